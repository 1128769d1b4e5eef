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

// Results of any kind are welcome: the suites answer with what they like.
const asked = (extra, request) => extra.sendRequest(request, types.ResultSchema.passthrough());
const known = (extra, key) => asked(extra, offer.QUESTIONS[key]);
const words = ({ content }) => (Array.isArray(content) ? content[0] : content)?.text;

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
    return say(text(`LLM response: ${words(await asked(extra, offer.sample(prompt)))}`));
  },

  async test_input_required_result_elicitation(_, extra) {
    return say(text(`Hello, ${(await known(extra, 'user_name')).content?.name}!`));
  },

  async test_input_required_result_sampling(_, extra) {
    return say(text(words(await known(extra, 'capital_question'))));
  },

  async test_input_required_result_list_roots(_, extra) {
    return say(text((await known(extra, 'client_roots')).roots.map(({ uri }) => uri).join(' ')));
  },

  async test_input_required_result_request_state(_, extra) {
    await known(extra, 'confirm');
    return say(text('state-ok'));
  },

  async test_input_required_result_multiple_inputs(_, extra) {
    const keys = ['user_name', 'greeting', 'client_roots'];
    const [name, greeting] = await Promise.all(keys.map((key) => known(extra, key)));
    return say(text(`${words(greeting)} ${name.content?.name}`));
  },

  async test_input_required_result_multi_round(_, extra) {
    const name = await known(extra, 'step1');
    const color = await known(extra, 'step2');
    return say(text(`${name.content?.name} likes ${color.content?.color}`));
  },

  async test_input_required_result_tampered_state(_, extra) {
    await known(extra, 'confirm');
    return say(text('state-ok'));
  },

  async test_input_required_result_capabilities(_, extra) {
    // It asks for everything; who stands between knows what the client can do.
    await Promise.allSettled(['user_name', 'greeting', 'client_roots'].map((key) => known(extra, key)));
    return say(text('done'));
  },

  async test_missing_capability(_, extra) {
    await known(extra, 'greeting');
    return say(text('It is there.'));
  },

  async test_logging_tool(_, extra) {
    const params = { level: 'info', data: 'only for those who asked for it' };
    await extra.sendNotification({ method: 'notifications/message', params });
    return say(text('It logged.'));
  },

  async test_streaming_elicitation(_, extra) {
    await known(extra, 'user_name');
    return say(text('done'));
  },

  async test_headers({ region }) {
    return say(text(`In ${region}`));
  },

  async test_reconnection(_, extra) {
    extra.closeSSEStream?.();
    await pause(100);
    return say(text('You came back.'));
  },
};

// Comes and goes whenever a change is asked for.
const visits = { tool: false, prompt: false };

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

  server.setRequestHandler(types.ListToolsRequestSchema, async () => ({
    tools: [...offer.TOOLS, offer.RECONNECTION, ...(visits.tool ? [offer.VISITOR] : [])],
  }));
  server.setRequestHandler(types.CallToolRequestSchema, async ({ params }, extra) => {
    if (offer.CONSTANT[params.name]) return offer.CONSTANT[params.name];
    if (params.name === 'test_trigger_tool_change') {
      visits.tool = !visits.tool;
      await server.sendToolListChanged();
      return say(text('It changed.'));
    }
    if (params.name === 'test_trigger_prompt_change') {
      visits.prompt = !visits.prompt;
      await server.sendPromptListChanged();
      return say(text('It changed.'));
    }
    const form = offer.FORMS[params.name]?.(params.arguments ?? {});
    if (form) return offer.filled(await asked(extra, { method: 'elicitation/create', params: form }));
    if (!TOOLS[params.name]) throw unknown('tool');
    return TOOLS[params.name](params.arguments ?? {}, extra);
  });
  server.setRequestHandler(types.ListPromptsRequestSchema, async () => ({
    prompts: [...offer.PROMPTS, offer.INPUT_PROMPT, ...(visits.prompt ? [offer.VISITING_PROMPT] : [])],
  }));
  server.setRequestHandler(types.GetPromptRequestSchema, async ({ params }, extra) => {
    if (params.name === offer.INPUT_PROMPT.name) {
      const context = (await known(extra, 'user_context')).content?.context;
      return { messages: [{ role: 'user', content: text(`In this context: ${context}`) }] };
    }
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
