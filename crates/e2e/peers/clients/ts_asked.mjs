// A client on the TypeScript SDK 1.x with parallel calls: it answers a question only after the other calls have ended.
//
// The first argument is the address of a gateway with `python_asks.py` behind it under the name `s`. Prints the answers.

import { Client } from '@modelcontextprotocol/sdk/client/index.js';
import { StreamableHTTPClientTransport } from '@modelcontextprotocol/sdk/client/streamableHttp.js';
import { ElicitRequestSchema } from '@modelcontextprotocol/sdk/types.js';

const client = new Client({ name: 'asked', version: '1.0.0' }, { capabilities: { elicitation: {} } });
const call = (name) => client.callTool({ name: `s__${name}`, arguments: {} });
const calls = {};

client.setRequestHandler(ElicitRequestSchema, async () => {
  await call('release');
  await calls.other;
  return { action: 'accept', content: { name: 'Ann' } };
});

await client.connect(new StreamableHTTPClientTransport(new URL(process.argv[2])));
calls.ask = call('ask');
calls.other = call('other');
for (const name of ['ask', 'other']) {
  const answer = await calls[name];
  console.log(`${name}: ${Boolean(answer.isError)}: ${answer.content[0].text}`);
}
await client.close();
