// A client on the TypeScript SDK 2.x. The second argument is its mode: `legacy`, its default, or `auto`, which
// first asks a sibling process which era the server speaks.

import { Client, StreamableHTTPClientTransport } from '@modelcontextprotocol/client';
import { StdioClientTransport } from '@modelcontextprotocol/client/stdio';
import { SETUP, result, serve } from './line.mjs';

await serve(async () => {
  const client = new Client({ name: 'matrix', version: '1.0.0' }, { versionNegotiation: { mode: process.argv[3] } });
  const transport = SETUP.url
    ? new StreamableHTTPClientTransport(new URL(SETUP.url), { requestInit: { headers: SETUP.headers } })
    : new StdioClientTransport(SETUP);
  await client.connect(transport);
  return {
    version: client.getNegotiatedProtocolVersion(),
    call: async (tool, args) => result(await client.callTool({ name: tool, arguments: args })),
    names: async () => (await client.listTools()).tools.map((tool) => tool.name),
    close: () => client.close(),
  };
});
