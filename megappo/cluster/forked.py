"""``forked.py SOCKET SCRIPT ARGUMENT ...``: have the fork server run a script; where none answers, Python runs it.

It starts with every worker, so it imports next to nothing.
"""

import json
import os
import socket
import sys

_path, *_command = sys.argv[1:]
try:
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(_path)
        what = {"argv": _command, "folder": os.getcwd(), "environment": dict(os.environ)}
        request = json.dumps(what).encode()
        socket.send_fds(server, [len(request).to_bytes(8, "little")], [0, 1, 2])
        server.sendall(request)
        is_running = server.recv(1) == b"1"
except OSError:
    is_running = False
if not is_running:
    os.execv(sys.executable, [sys.executable, *_command])
