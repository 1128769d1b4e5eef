// What both fixture servers offer: the tools, prompts and resources that the conformance suites ask for by name.

const PIXEL =
  'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg==';
const SILENCE = 'UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAIA+AAACABAAZGF0YQAAAAA=';

export const text = (words) => ({ type: 'text', text: words });
export const say = (...content) => ({ content });

const embedded = (uri, mimeType, words) => ({ type: 'resource', resource: { uri, mimeType, text: words } });
const picture = { type: 'image', data: PIXEL, mimeType: 'image/png' };

// Tools whose answer is always the same.
export const CONSTANT = {
  test_simple_text: say(text('This is a simple text response for testing.')),
  test_image_content: say(picture),
  test_audio_content: say({ type: 'audio', data: SILENCE, mimeType: 'audio/wav' }),
  test_embedded_resource: say(
    embedded('test://embedded-resource', 'text/plain', 'This is an embedded resource content.'),
  ),
  test_multiple_content_types: say(
    text('Multiple content types test:'),
    picture,
    embedded('test://mixed-content-resource', 'application/json', '{"test":"data","value":123}'),
  ),
  test_error_handling: {
    ...say(text('This tool intentionally returns an error for testing')),
    isError: true,
  },
};

const object = (properties = {}, required = []) => ({ type: 'object', properties, required });
const string = { type: 'string' };

// Every keyword of it must reach the client as it is.
const RICH_SCHEMA = {
  $schema: 'https://json-schema.org/draft/2020-12/schema',
  type: 'object',
  $defs: { address: { $anchor: 'addressDef', type: 'object', properties: { street: string, city: string } } },
  properties: {
    name: string,
    address: { $ref: '#/$defs/address' },
    contactMethod: { type: 'string', enum: ['phone', 'email'] },
    phone: string,
    email: string,
  },
  allOf: [{ anyOf: [{ required: ['phone'] }, { required: ['email'] }] }],
  if: { properties: { contactMethod: { const: 'phone' } }, required: ['contactMethod'] },
  then: { required: ['phone'] },
  else: { required: ['email'] },
  additionalProperties: false,
};

const tool = (name, inputSchema = object()) => ({ name, description: `What the suite calls ${name}`, inputSchema });

export const COMMON_TOOLS = [
  ...Object.keys(CONSTANT).map((name) => tool(name)),
  tool('test_tool_with_logging'),
  tool('test_tool_with_progress'),
  tool('json_schema_2020_12_tool', RICH_SCHEMA),
];

export const HANDSHAKE_TOOLS = [
  ...COMMON_TOOLS,
  tool('test_sampling', object({ prompt: string }, ['prompt'])),
  tool('test_elicitation', object({ message: string }, ['message'])),
  tool('test_elicitation_sep1034_defaults'),
  tool('test_elicitation_sep1330_enums'),
  tool('test_reconnection'),
];

const INPUT_REQUIRED = [
  'elicitation',
  'sampling',
  'list_roots',
  'request_state',
  'multiple_inputs',
  'multi_round',
  'tampered_state',
  'capabilities',
];

export const STATELESS_TOOLS = [
  ...COMMON_TOOLS,
  ...INPUT_REQUIRED.map((name) => tool(`test_input_required_result_${name}`)),
  tool('test_missing_capability'),
  tool('test_logging_tool'),
  tool('test_streaming_elicitation'),
  tool('test_trigger_tool_change'),
  tool('test_trigger_prompt_change'),
  tool('test_headers', object({ region: { type: 'string', 'x-mcp-header': 'Region' } }, ['region'])),
];

const user = (content) => ({ role: 'user', content });

const prompt = (name, ...args) => ({
  name,
  description: `What the suite calls ${name}`,
  arguments: args.map((argument) => ({ name: argument, description: `The ${argument}`, required: true })),
});

export const PROMPTS = [
  prompt('test_simple_prompt'),
  prompt('test_prompt_with_arguments', 'arg1', 'arg2'),
  prompt('test_prompt_with_embedded_resource', 'resourceUri'),
  prompt('test_prompt_with_image'),
];

export const INPUT_PROMPT = prompt('test_input_required_result_prompt');

// Undefined: there is no such prompt.
export function getPrompt(name, args = {}) {
  switch (name) {
    case 'test_simple_prompt':
      return { messages: [user(text('This is a simple prompt for testing.'))] };
    case 'test_prompt_with_arguments':
      return { messages: [user(text(`Prompt with arguments: arg1='${args.arg1}', arg2='${args.arg2}'`))] };
    case 'test_prompt_with_embedded_resource':
      return {
        messages: [
          user(embedded(args.resourceUri, 'text/plain', 'Embedded resource content for testing.')),
          user(text('Please process the embedded resource above.')),
        ],
      };
    case 'test_prompt_with_image':
      return { messages: [user(picture), user(text('Please analyze the image above.'))] };
  }
}

const resource = (uri, name, mimeType) => ({ uri, name, description: `The ${name}`, mimeType });

export const RESOURCES = [
  resource('test://static-text', 'static text', 'text/plain'),
  resource('test://static-binary', 'static binary', 'image/png'),
  resource('test://watched-resource', 'watched resource', 'text/plain'),
];

export const TEMPLATES = [
  {
    uriTemplate: 'test://template/{id}/data',
    name: 'template',
    description: 'Data by its id',
    mimeType: 'application/json',
  },
];

// Undefined: there is no such resource.
export function readResource(uri) {
  const id = /^test:\/\/template\/([^/]+)\/data$/.exec(uri)?.[1];
  if (id !== undefined) {
    const data = JSON.stringify({ id, templateTest: true, data: `Data for ID: ${id}` });
    return { contents: [{ uri, mimeType: 'application/json', text: data }] };
  }
  switch (uri) {
    case 'test://static-text':
      return { contents: [{ uri, mimeType: 'text/plain', text: 'This is the content of the static text resource.' }] };
    case 'test://static-binary':
      return { contents: [{ uri, mimeType: 'image/png', blob: PIXEL }] };
    case 'test://watched-resource':
      return { contents: [{ uri, mimeType: 'text/plain', text: 'It may change.' }] };
  }
}

export const COMPLETION = { completion: { values: ['paris', 'park', 'party'], total: 3, hasMore: false } };

// Only names that mean this machine: somebody else's page must not reach us under a name of its own.
export function isLocal(request) {
  const names = ['127.0.0.1', 'localhost', '[::1]'];
  const host = (request.headers.host ?? '').replace(/:\d+$/, '');
  const origin = request.headers.origin;
  return names.includes(host) && (origin === undefined || names.includes(new URL(origin).hostname));
}
