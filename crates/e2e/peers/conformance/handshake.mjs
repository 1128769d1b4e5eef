// The fixture of the handshake era, on the TypeScript SDK 1.x: `handshake.mjs stdio`, or `handshake.mjs http PORT`.

import { randomUUID } from 'node:crypto';
import { createServer } from 'node:http';

import { Server } from '@modelcontextprotocol/sdk/server/index.js';
import { StdioServerTransport } from '@modelcontextprotocol/sdk/server/stdio.js';
import { StreamableHTTPServerTransport } from '@modelcontextprotocol/sdk/server/streamableHttp.js';
import * as types from '@modelcontextprotocol/sdk/types.js';

import * as offer from './offer.mjs';

const { say, text } = offer;
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

const elicited = async (extra, message, requestedSchema) =>
  extra.sendRequest(
    { method: 'elicitation/create', params: { mode: 'form', message, requestedSchema } },
    types.ElicitResultSchema,
  );

const choices = (...names) => names.map((title, at) => ({ const: `value${at + 1}`, title }));

const TOOLS = {
  async test_tool_with_logging(_, extra) {
    for (const data of ['Tool execution started', 'Tool processing data', 'Tool execution completed']) {
      await extra.sendNotification({ method: 'notifications/message', params: { level: 'info', data } });
      await pause(20);
    }
    return say(text('It logged.'));
  },

  async test_tool_with_progress(_, extra) {
    const progressToken = extra._meta?.progressToken ?? 0;
    for (const progress of [0, 50, 100]) {
      await extra.sendNotification({
        method: 'notifications/progress',
        params: { progressToken, progress, total: 100, message: `Completed step ${progress} of 100` },
      });
      await pause(20);
    }
    return say(text(String(progressToken)));
  },

  async json_schema_2020_12_tool(args) {
    return say(text(JSON.stringify(args)));
  },

  async test_sampling({ prompt }, extra) {
    const params = { messages: [{ role: 'user', content: text(prompt) }], maxTokens: 100 };
    const result = await extra.sendRequest(
      { method: 'sampling/createMessage', params },
      types.CreateMessageResultSchema,
    );
    return say(text(`LLM response: ${result.content.text}`));
  },

  async test_elicitation({ message }, extra) {
    const field = (description) => ({ type: 'string', description });
    const { action, content } = await elicited(extra, message, {
      type: 'object',
      properties: { username: field("User's response"), email: field("User's email address") },
      required: ['username', 'email'],
    });
    return say(text(`User response: action=${action}, content=${JSON.stringify(content ?? {})}`));
  },

  async test_elicitation_sep1034_defaults(_, extra) {
    const { action, content } = await elicited(extra, 'Please look through the defaults', {
      type: 'object',
      properties: {
        name: { type: 'string', description: 'Name', default: 'John Doe' },
        age: { type: 'integer', description: 'Age', default: 30 },
        score: { type: 'number', description: 'Score', default: 95.5 },
        status: { type: 'string', enum: ['active', 'inactive', 'pending'], default: 'active' },
        verified: { type: 'boolean', description: 'Verified', default: true },
      },
      required: [],
    });
    return say(text(`Elicitation completed: action=${action}, content=${JSON.stringify(content ?? {})}`));
  },

  async test_elicitation_sep1330_enums(_, extra) {
    const options = ['option1', 'option2', 'option3'];
    const { action, content } = await elicited(extra, 'Please choose', {
      type: 'object',
      properties: {
        untitledSingle: { type: 'string', enum: options },
        titledSingle: { type: 'string', oneOf: choices('First Option', 'Second Option', 'Third Option') },
        legacyEnum: {
          type: 'string',
          enum: ['opt1', 'opt2', 'opt3'],
          enumNames: ['Option One', 'Option Two', 'Option Three'],
        },
        untitledMulti: { type: 'array', items: { type: 'string', enum: options } },
        titledMulti: { type: 'array', items: { anyOf: choices('First Choice', 'Second Choice', 'Third Choice') } },
      },
      required: [],
    });
    return say(text(`Elicitation completed: action=${action}, content=${JSON.stringify(content ?? {})}`));
  },

  async test_reconnection(_, extra) {
    extra.closeSSEStream?.();
    await pause(100);
    return say(text('You came back.'));
  },
};

function build() {
  const server = new Server(
    { name: 'conformance-handshake', version: '1.0.0' },
    {
      capabilities: {
        tools: { listChanged: true },
        prompts: { listChanged: true },
        resources: { listChanged: true, subscribe: true },
        logging: {},
        completions: {},
      },
    },
  );
  const unknown = (what) => new types.McpError(types.ErrorCode.InvalidParams, `no such ${what}`);

  server.setRequestHandler(types.ListToolsRequestSchema, async () => ({ tools: offer.HANDSHAKE_TOOLS }));
  server.setRequestHandler(types.CallToolRequestSchema, async ({ params }, extra) => {
    if (offer.CONSTANT[params.name]) return offer.CONSTANT[params.name];
    if (!TOOLS[params.name]) throw unknown('tool');
    return TOOLS[params.name](params.arguments ?? {}, extra);
  });
  server.setRequestHandler(types.ListPromptsRequestSchema, async () => ({ prompts: offer.PROMPTS }));
  server.setRequestHandler(types.GetPromptRequestSchema, async ({ params }) => {
    const found = offer.getPrompt(params.name, params.arguments);
    if (!found) throw unknown('prompt');
    return found;
  });
  server.setRequestHandler(types.ListResourcesRequestSchema, async () => ({ resources: offer.RESOURCES }));
  server.setRequestHandler(types.ListResourceTemplatesRequestSchema, async () => ({
    resourceTemplates: offer.TEMPLATES,
  }));
  server.setRequestHandler(types.ReadResourceRequestSchema, async ({ params }) => {
    const found = offer.readResource(params.uri);
    if (!found) throw new types.McpError(-32002, 'no such resource', { uri: params.uri });
    return found;
  });
  server.setRequestHandler(types.SubscribeRequestSchema, async () => ({}));
  server.setRequestHandler(types.UnsubscribeRequestSchema, async () => ({}));
  server.setRequestHandler(types.CompleteRequestSchema, async () => offer.COMPLETION);
  server.setRequestHandler(types.SetLevelRequestSchema, async () => ({}));
  return server;
}

// What was said on a stream, so that it can be gone on with.
class Events {
  #said = [];

  async storeEvent(stream, message) {
    this.#said.push({ stream, message });
    return `${stream}/${this.#said.length}`;
  }

  async getStreamIdForEventId(id) {
    return id.slice(0, id.lastIndexOf('/'));
  }

  async replayEventsAfter(id, { send }) {
    const stream = await this.getStreamIdForEventId(id);
    for (let at = Number(id.slice(stream.length + 1)); at < this.#said.length; at += 1) {
      const { stream: other, message } = this.#said[at];
      // The first event of a stream only says where it begins.
      if (other === stream && message.jsonrpc) await send(`${stream}/${at + 1}`, message);
    }
    return stream;
  }
}

function serve(port) {
  const sessions = new Map();
  const listener = createServer(async (request, response) => {
    const refuse = (status, message) => {
      response.writeHead(status, { 'content-type': 'application/json' });
      response.end(JSON.stringify({ jsonrpc: '2.0', id: null, error: { code: -32000, message } }));
    };
    if (!offer.isLocal(request)) return refuse(403, 'not for you');
    const id = request.headers['mcp-session-id'];
    if (id !== undefined && !sessions.has(id)) return refuse(404, 'Session not found');
    let transport = sessions.get(id);
    if (!transport) {
      transport = new StreamableHTTPServerTransport({
        sessionIdGenerator: randomUUID,
        eventStore: new Events(),
        retryInterval: 500,
        onsessioninitialized: (session) => sessions.set(session, transport),
        onsessionclosed: (session) => sessions.delete(session),
      });
      await build().connect(transport);
    }
    await transport.handleRequest(request, response);
  });
  listener.listen(port, '127.0.0.1', () => console.error(`listening on port ${listener.address().port}`));
}

const [how, port] = process.argv.slice(2);
if (how === 'http') serve(Number(port));
else await build().connect(new StdioServerTransport());
