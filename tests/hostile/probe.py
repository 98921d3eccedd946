"""Asks a server for something now and then until its standard input ends, then tells how long each answer took.

A process of its own: a thread beside the one that makes megabytes of bodies would measure that.

    python probe.py PORT PATH EVERY_S
"""

import http.client
import json
import sys
import threading
import time


def main(port, path, every_s):
    """Ask, and print what came of it as JSON."""
    ended, took_s, failures = threading.Event(), [], []
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while not ended.wait(every_s):
        began = time.monotonic()
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                failures.append(str(answer.status))
        except (OSError, http.client.HTTPException) as error:
            failures.append(repr(error))
        finally:
            connection.close()
        took_s.append(time.monotonic() - began)
    sys.stdout.write(json.dumps({"took_s": took_s, "failures": failures}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
