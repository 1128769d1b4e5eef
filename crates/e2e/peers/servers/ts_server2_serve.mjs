// A server on the TypeScript SDK 2.x through serveStdio, which speaks both eras.

import { McpServer } from '@modelcontextprotocol/server';
import { serveStdio } from '@modelcontextprotocol/server/stdio';
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

serveStdio(build);
