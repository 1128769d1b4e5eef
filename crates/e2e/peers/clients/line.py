"""The line protocol between the matrix test and a Python client: one JSON object a line, an answer for each.

The first argument says what to start, {"command", "args", "env", "cwd"}, or where it is, {"url", "headers"}. The first line written
says that the client is connected; then each line read is an operation.
"""

import asyncio
import json
import sys

SETUP = json.loads(sys.argv[1])
URL = SETUP.get("url")
HEADERS = SETUP.get("headers")
MODE = sys.argv[2] if len(sys.argv) > 2 else "auto"


def say(answer):
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def result(is_error, content, structured):
    text = "".join(block.text for block in content if block.type == "text")
    return {"isError": bool(is_error), "text": text, "structured": structured}


async def serve(version, call, names, progress=None):
    """Answers operations until the test closes; `call`, `names` and `progress` are the SDK's own ways to do them."""
    say({"ok": {"version": version}})
    while line := await asyncio.to_thread(sys.stdin.readline):
        operation = json.loads(line)
        if operation["op"] == "close":
            break
        try:
            if operation["op"] == "call":
                say({"ok": await call(operation["tool"], operation["args"])})
            elif operation["op"] == "progress":
                heard = []
                answer = await progress(operation["tool"], operation["args"], heard.append)
                say({"ok": {**answer, "progress": heard}})
            elif operation["op"] == "list":
                say({"ok": {"tools": await names()}})
            elif operation["op"] == "era":
                say({"ok": {"version": version}})
            else:
                say({"error": f"no such operation: {line!r}"})
        except Exception as error:  # Whatever the SDK raises is an answer to judge, not a reason to stop.
            say({"error": f"{type(error).__name__}: {error}"})


def run(main):
    try:
        asyncio.run(main())
    except Exception as error:
        # Task groups wrap the cause, sometimes twice; only the innermost says what went wrong.
        while inner := getattr(error, "exceptions", None):
            error = inner[0]
        say({"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)
    say({"ok": {"closed": True}})
