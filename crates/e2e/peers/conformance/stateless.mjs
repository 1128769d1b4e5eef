// The fixture of the stateless era, on the TypeScript SDK 2.x: `stateless.mjs stdio`, or `stateless.mjs http PORT`.

import { createServer } from 'node:http';
import { Readable } from 'node:stream';

import * as sdk from '@modelcontextprotocol/server';
import { serveStdio } from '@modelcontextprotocol/server/stdio';

import * as offer from './offer.mjs';

const { say, text } = offer;
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const CAPABILITIES = 'io.modelcontextprotocol/clientCapabilities';

const codec = sdk.createRequestStateCodec({ key: 'a key of this fixture, which guards nothing but tests' });

const { sample, QUESTIONS } = offer;
const about = (...keys) => Object.fromEntries(keys.map((key) => [key, QUESTIONS[key]]));

const need = (inputRequests, requestState) => ({
  resultType: 'input_required',
  inputRequests,
  ...(requestState === undefined ? {} : { requestState }),
});

const given = (request, key) => {
  const response = request.inputResponses?.[key];
  return response && typeof response === 'object' ? response : undefined;
};
const accepted = (request, key, name) => {
  const response = given(request, key);
  return response?.action === 'accept' ? response.content?.[name] : undefined;
};
const said = (request, key) => {
  const { content } = given(request, key) ?? {};
  return (Array.isArray(content) ? content[0] : content)?.text;
};

const TOOLS = {
  async test_tool_with_logging(request) {
    for (const words of ['Tool execution started', 'Tool processing data', 'Tool execution completed']) {
      await request.log('info', words);
      await pause(20);
    }
    return say(text('It logged.'));
  },

  async test_tool_with_progress(request) {
    const progressToken = request._meta?.progressToken ?? 0;
    for (const progress of [0, 50, 100]) {
      await request.notify({
        method: 'notifications/progress',
        params: { progressToken, progress, total: 100, message: `Completed step ${progress} of 100` },
      });
      await pause(20);
    }
    return say(text(String(progressToken)));
  },

  async json_schema_2020_12_tool(_, args) {
    return say(text(JSON.stringify(args)));
  },

  async test_sampling(request, { prompt }) {
    const answer = said(request, 'sampled');
    return answer ? say(text(`LLM response: ${answer}`)) : need({ sampled: sample(prompt) });
  },

  async test_input_required_result_elicitation(request) {
    const name = accepted(request, 'user_name', 'name');
    return typeof name === 'string'
      ? say(text(`Hello, ${name}!`))
      : need(about('user_name'));
  },

  async test_input_required_result_sampling(request) {
    const answer = said(request, 'capital_question');
    return answer ? say(text(answer)) : need(about('capital_question'));
  },

  async test_input_required_result_list_roots(request) {
    const roots = given(request, 'client_roots')?.roots;
    return roots ? say(text(roots.map(({ uri }) => uri).join(' '))) : need(about('client_roots'));
  },

  async test_input_required_result_request_state(request) {
    if (given(request, 'confirm') && request.requestState()?.step === 'confirm') return say(text('state-ok'));
    return need(about('confirm'), await codec.mint({ step: 'confirm' }));
  },

  async test_input_required_result_multiple_inputs(request) {
    if (['user_name', 'greeting', 'client_roots'].every((key) => given(request, key))) {
      return say(text(`${said(request, 'greeting')} ${accepted(request, 'user_name', 'name')}`));
    }
    return need(about('user_name', 'greeting', 'client_roots'), await codec.mint({ step: 'all' }));
  },

  async test_input_required_result_multi_round(request) {
    const state = request.requestState();
    if (state?.step === 2 && given(request, 'step2')) {
      return say(text(`${state.name} likes ${accepted(request, 'step2', 'color')}`));
    }
    if (state?.step === 1 && given(request, 'step1')) {
      const name = accepted(request, 'step1', 'name');
      return need(about('step2'), await codec.mint({ step: 2, name }));
    }
    return need(about('step1'), await codec.mint({ step: 1 }));
  },

  async test_input_required_result_tampered_state(request) {
    if (given(request, 'confirm') && request.requestState()?.step === 'tamper') return say(text('state-ok'));
    return need(about('confirm'), await codec.mint({ step: 'tamper' }));
  },

  async test_input_required_result_capabilities(request) {
    const able = request.envelope?.[CAPABILITIES] ?? {};
    const keys = [able.elicitation && 'user_name', able.sampling && 'greeting', able.roots && 'client_roots'].filter(Boolean);
    return keys.every((key) => given(request, key)) ? say(text('done')) : need(about(...keys));
  },

  async test_missing_capability(request) {
    if (request.envelope?.[CAPABILITIES]?.sampling) return say(text('It is there.'));
    throw new sdk.MissingRequiredClientCapabilityError({ requiredCapabilities: { sampling: {} } });
  },

  async test_logging_tool(request) {
    await request.log('info', 'only for those who asked for it');
    return say(text('It logged.'));
  },

  async test_headers(_, { region }) {
    return say(text(`In ${region}`));
  },

  async test_streaming_elicitation(request) {
    if (given(request, 'user_name')) return say(text('done'));
    return need(about('user_name'));
  },
};

// Comes and goes whenever a change is asked for; of the whole process, as every request has a server of its own.
const visits = { tool: false, prompt: false };

function build(notify) {
  const server = new sdk.Server(
    { name: 'conformance-stateless', version: '1.0.0' },
    {
      capabilities: {
        tools: { listChanged: true },
        prompts: { listChanged: true },
        resources: { listChanged: true, subscribe: true },
        logging: {},
        completions: {},
      },
      requestState: { verify: codec.verify },
    },
  );
  const unknown = (what) => new sdk.ProtocolError(sdk.ProtocolErrorCode.InvalidParams, `no such ${what}`);
  const TRIGGERS = {
    test_trigger_tool_change() {
      visits.tool = !visits.tool;
      return notify ? notify.toolsChanged() : server.sendToolListChanged();
    },
    test_trigger_prompt_change() {
      visits.prompt = !visits.prompt;
      return notify ? notify.promptsChanged() : server.sendPromptListChanged();
    },
  };

  server.setRequestHandler('tools/list', async () => ({
    tools: [...offer.TOOLS, ...(visits.tool ? [offer.VISITOR] : [])],
  }));
  server.setRequestHandler('tools/call', async ({ params }, { mcpReq }) => {
    if (offer.CONSTANT[params.name]) return offer.CONSTANT[params.name];
    if (TRIGGERS[params.name]) {
      await TRIGGERS[params.name]();
      return say(text('It changed.'));
    }
    const form = offer.FORMS[params.name]?.(params.arguments ?? {});
    if (form) {
      const answer = given(mcpReq, 'form');
      return answer ? offer.filled(answer) : need({ form: { method: 'elicitation/create', params: form } });
    }
    if (!TOOLS[params.name]) throw unknown('tool');
    return TOOLS[params.name](mcpReq, params.arguments ?? {});
  });
  server.setRequestHandler('prompts/list', async () => ({
    prompts: [...offer.PROMPTS, offer.INPUT_PROMPT, ...(visits.prompt ? [offer.VISITING_PROMPT] : [])],
  }));
  server.setRequestHandler('prompts/get', async ({ params }, { mcpReq }) => {
    if (params.name === offer.INPUT_PROMPT.name) {
      const context = accepted(mcpReq, 'user_context', 'context');
      return context === undefined
        ? need(about('user_context'))
        : { messages: [{ role: 'user', content: text(`In this context: ${context}`) }] };
    }
    const found = offer.getPrompt(params.name, params.arguments);
    if (!found) throw unknown('prompt');
    return found;
  });
  server.setRequestHandler('resources/list', async () => ({ resources: offer.RESOURCES }));
  server.setRequestHandler('resources/templates/list', async () => ({ resourceTemplates: offer.TEMPLATES }));
  server.setRequestHandler('resources/read', async ({ params }) => {
    const found = offer.readResource(params.uri);
    if (!found) throw new sdk.ResourceNotFoundError(params.uri);
    return found;
  });
  server.setRequestHandler('completion/complete', async () => offer.COMPLETION);
  return server;
}

function serve(port) {
  const handler = sdk.createMcpHandler(() => build(handler.notify));
  const listener = createServer(async (request, response) => {
    if (!offer.isLocal(request)) {
      response.writeHead(403).end();
      return;
    }
    const gone = new AbortController();
    response.on('close', () => gone.abort());
    const answer = await handler.fetch(
      new Request(`http://${request.headers.host}${request.url}`, {
        method: request.method,
        headers: Object.entries(request.headers).filter(([, value]) => typeof value === 'string'),
        body: request.method === 'POST' ? Readable.toWeb(request) : undefined,
        duplex: 'half',
        signal: gone.signal,
      }),
    );
    response.writeHead(answer.status, Object.fromEntries(answer.headers));
    if (answer.body) Readable.fromWeb(answer.body).on('error', () => response.destroy()).pipe(response);
    else response.end();
  });
  listener.listen(port, '127.0.0.1', () => console.error(`listening on port ${listener.address().port}`));
}

const [how, port] = process.argv.slice(2);
if (how === 'http') serve(Number(port));
else serveStdio(() => build());
