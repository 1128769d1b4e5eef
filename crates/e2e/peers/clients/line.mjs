// The line protocol between the matrix test and a TypeScript client: one JSON object a line, an answer for each.
// The first argument says what to start, {"command", "args", "env", "cwd"}, or where it is, {"url", "headers"}.

import { createInterface } from 'node:readline';

export const SETUP = JSON.parse(process.argv[2]);

const say = (answer) => process.stdout.write(JSON.stringify(answer) + '\n');

export const result = (answer) => ({
  isError: answer.isError === true,
  text: answer.content.filter((block) => block.type === 'text').map((block) => block.text).join(''),
  structured: answer.structuredContent ?? null,
});

// Answers operations until the test closes. `connect` gives the SDK's own ways to do them.
export async function serve(connect) {
  try {
    const { version, call, names, close, progress } = await connect();
    say({ ok: { version } });
    for await (const text of createInterface({ input: process.stdin })) {
      const operation = JSON.parse(text);
      if (operation.op === 'close') break;
      try {
        if (operation.op === 'call') say({ ok: await call(operation.tool, operation.args) });
        else if (operation.op === 'progress') {
          const heard = [];
          const answer = await progress(operation.tool, operation.args, (message) => heard.push(message));
          say({ ok: { ...answer, progress: heard } });
        } else if (operation.op === 'list') say({ ok: { tools: await names() } });
        else if (operation.op === 'era') say({ ok: { version } });
        else say({ error: `no such operation: ${text}` });
      } catch (error) {
        // Whatever the SDK throws is an answer to judge, not a reason to stop.
        say({ error: `${error.name}: ${error.message}` });
      }
    }
    await close();
    say({ ok: { closed: true } });
  } catch (error) {
    say({ error: `${error.name}: ${error.message}` });
    process.exitCode = 1;
  }
  // The readline stream would hold the process open for as long as the test holds our stdin.
  process.stdin.destroy();
}
