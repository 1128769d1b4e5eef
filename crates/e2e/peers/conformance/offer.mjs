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

const COMMON_TOOLS = [
  ...Object.keys(CONSTANT).map((name) => tool(name)),
  tool('test_tool_with_logging'),
  tool('test_tool_with_progress'),
  tool('json_schema_2020_12_tool', RICH_SCHEMA),
];

// Tools that ask their client something: the one era by requests, the other by what a call is answered with.
const ASKING_TOOLS = [
  tool('test_sampling', object({ prompt: string }, ['prompt'])),
  tool('test_elicitation', object({ message: string }, ['message'])),
  tool('test_elicitation_sep1034_defaults'),
  tool('test_elicitation_sep1330_enums'),
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

// What the newer suite asks for besides.
const NEWER_TOOLS = [
  ...INPUT_REQUIRED.map((name) => tool(`test_input_required_result_${name}`)),
  tool('test_missing_capability'),
  tool('test_logging_tool'),
  tool('test_streaming_elicitation'),
  tool('test_trigger_tool_change'),
  tool('test_trigger_prompt_change'),
  tool('test_headers', object({ region: { type: 'string', 'x-mcp-header': 'Region' } }, ['region'])),
];

export const TOOLS = [...COMMON_TOOLS, ...ASKING_TOOLS, ...NEWER_TOOLS];
export const RECONNECTION = tool('test_reconnection');

const field = (description) => ({ type: 'string', description });
const choices = (...names) => names.map((title, at) => ({ const: `value${at + 1}`, title }));
const OPTIONS = ['option1', 'option2', 'option3'];

// What they ask for, as the parameters of `elicitation/create`.
export const FORMS = {
  test_elicitation: ({ message }) => ({
    mode: 'form',
    message,
    requestedSchema: object({ username: field("User's response"), email: field("User's email address") }, [
      'username',
      'email',
    ]),
  }),
  test_elicitation_sep1034_defaults: () => ({
    mode: 'form',
    message: 'Please look through the defaults',
    requestedSchema: object({
      name: { type: 'string', description: 'Name', default: 'John Doe' },
      age: { type: 'integer', description: 'Age', default: 30 },
      score: { type: 'number', description: 'Score', default: 95.5 },
      status: { type: 'string', enum: ['active', 'inactive', 'pending'], default: 'active' },
      verified: { type: 'boolean', description: 'Verified', default: true },
    }),
  }),
  test_elicitation_sep1330_enums: () => ({
    mode: 'form',
    message: 'Please choose',
    requestedSchema: object({
      untitledSingle: { type: 'string', enum: OPTIONS },
      titledSingle: { type: 'string', oneOf: choices('First Option', 'Second Option', 'Third Option') },
      legacyEnum: {
        type: 'string',
        enum: ['opt1', 'opt2', 'opt3'],
        enumNames: ['Option One', 'Option Two', 'Option Three'],
      },
      untitledMulti: { type: 'array', items: { type: 'string', enum: OPTIONS } },
      titledMulti: { type: 'array', items: { anyOf: choices('First Choice', 'Second Choice', 'Third Choice') } },
    }),
  }),
};

const form = (message, name, type = 'string') => ({
  method: 'elicitation/create',
  params: { mode: 'form', message, requestedSchema: object({ [name]: { type } }, [name]) },
});
export const sample = (words, maxTokens = 100) => ({
  method: 'sampling/createMessage',
  params: { messages: [{ role: 'user', content: text(words) }], maxTokens },
});

// What the suites want to be asked, by the names they know the questions by.
export const QUESTIONS = {
  user_name: form('What is your name?', 'name'),
  capital_question: sample('What is the capital of France?'),
  client_roots: { method: 'roots/list', params: {} },
  confirm: form('Please confirm', 'ok', 'boolean'),
  greeting: sample('Generate a greeting', 50),
  step1: form('Step 1: What is your name?', 'name'),
  step2: form('Step 2: What is your favorite color?', 'color'),
  user_context: form('What context should the prompt use?', 'context'),
};

export const filled = ({ action, content }) =>
  say(text(`User response: action=${action}, content=${JSON.stringify(content ?? {})}`));

// Offered only at times, so that two lists of one client can differ.
export const VISITOR = tool('test_visitor');

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

export const VISITING_PROMPT = prompt('test_visiting_prompt');
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

// Only names of this machine, against DNS rebinding by a page of another origin.
export function isLocal(request) {
  const names = ['127.0.0.1', 'localhost', '[::1]'];
  const host = (request.headers.host ?? '').replace(/:\d+$/, '');
  const origin = request.headers.origin;
  return names.includes(host) && (origin === undefined || names.includes(new URL(origin).hostname));
}
