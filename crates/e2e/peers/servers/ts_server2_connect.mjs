// A server on the TypeScript SDK 2.x tied to one transport by hand: it knows only the handshake.

import { McpServer } from '@modelcontextprotocol/server';
import { StdioServerTransport } from '@modelcontextprotocol/server/stdio';
import { z } from 'zod';

const VERSION = '1';

function build() {
  const server = new McpServer({ name: 'matrix', version: '1.0.0' });
  const say = (text) => ({ content: [{ type: 'text', text }] });
  server.registerTool('echo', { inputSchema: z.object({ text: z.string() }) }, async ({ text }) => say(text));
  server.registerTool('version', {}, async () => say(VERSION));
  server.registerTool('pid', {}, async () => say(String(process.pid)));
  server.registerTool('exit42', {}, async () => process.exit(42));
  return server;
}

await build().connect(new StdioServerTransport());
