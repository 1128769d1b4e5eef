// A client on the TypeScript SDK 1.x, which knows only the handshake.

import { Client } from '@modelcontextprotocol/sdk/client/index.js';
import { StdioClientTransport } from '@modelcontextprotocol/sdk/client/stdio.js';
import { StreamableHTTPClientTransport } from '@modelcontextprotocol/sdk/client/streamableHttp.js';
import { SETUP, result, serve } from './line.mjs';

await serve(async () => {
  const client = new Client({ name: 'matrix', version: '1.0.0' });
  const transport = SETUP.url
    ? new StreamableHTTPClientTransport(new URL(SETUP.url), { requestInit: { headers: SETUP.headers } })
    : new StdioClientTransport(SETUP);
  let version;
  // The client keeps the agreed version to itself and tells only its transport.
  const told = transport.setProtocolVersion?.bind(transport);
  transport.setProtocolVersion = (agreed) => {
    version = agreed;
    told?.(agreed);
  };
  // The client reports progress later than a response that arrives together with it, and then not at all. So each message
  // is looked at as it arrives.
  let heard = () => {};
  transport.onmessage = (message) => {
    if (message.method === 'notifications/progress') heard(message.params.message);
  };
  await client.connect(transport);
  return {
    version,
    call: async (tool, args) => result(await client.callTool({ name: tool, arguments: args })),
    progress: async (tool, args, hear) => {
      heard = hear;
      // The option makes the client send a token.
      return result(await client.callTool({ name: tool, arguments: args }, undefined, { onprogress: () => {} }));
    },
    names: async () => (await client.listTools()).tools.map((tool) => tool.name),
    close: () => client.close(),
  };
});
