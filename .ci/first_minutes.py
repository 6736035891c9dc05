"""What a newcomer does, with nothing installed but Penstock: start it, wait until it is ready, ask the demo model."""

import importlib.util
import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

if importlib.util.find_spec("torch") is not None:
    sys.exit("torch is installed: this environment shows nothing")
penstock = Path(sys.executable).with_name("penstock")
started = time.monotonic()
server = subprocess.Popen(
    [penstock, "serve", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"],
    stderr=subprocess.PIPE,
    text=True,
)
try:
    url = ""
    for line in server.stderr or ():
        print(line, end="")
        if found := re.search(r"listening on (http://\S+)", line):
            url = found[1]
        if " ready: " in line:
            break
    else:
        sys.exit("the server ended before it was ready")
    print(f"ready after {time.monotonic() - started:.1f} s")
    body = {"model": "penstock-demo", "messages": [{"role": "user", "content": "What does os.path.join do?"}]}
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        choice = json.load(answer)["choices"][0]
    print(choice["message"]["content"])
    if choice["finish_reason"] != "stop":
        sys.exit("the demo model did not stop by itself")
finally:
    server.terminate()
    server.wait(30)
