"""A judge behind a real HTTP server on loopback, which knows the right answers, and its faults."""

import json
import random
import re
import threading
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# what stands between the marks of a question: `<<<NAME MARK>>>`, and the same mark at the end
SHOWN = r"(?s)<<<(\w+) ([0-9a-f]+)>>>\n(.*?)\n<<<end \2>>>"


def by_gold(shown):
    """The verdict on a pair, or the grade of an answer, where a word is to be spelled backward."""
    right = shown["prompt"].split()[-1][::-1]
    if "answer" in shown:
        return "10" if f"<answer>{right}</answer>" in shown["answer"] else "1"
    a, b = (f"<answer>{right}</answer>" in shown[name] for name in ("answer_a", "answer_b"))
    return "tie" if a == b else "A" if a else "B"


class JudgeServer(ThreadingHTTPServer):
    """Serves POST /v1/chat/completions.

    `fault` gets the handler of a request, its question and what it shows. It returns a reply of its
    own, None (the `verdict` decides), or False, where it has answered the request itself or not.
    """

    daemon_threads = True

    def __init__(self, verdict=by_gold, fault=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.verdict, self.fault = verdict, fault
        self.lock = threading.Lock()
        self.bodies = []  # of all requests, in order
        self.headers = []
        self.times = {}  # by question: how often it was sent

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"

    def chance(self, question, salt=""):
        """A number from 0 to 1 that depends on the question and on how often it was sent."""
        text = f"{salt}{question}{self.times[question]}"
        return random.Random(sha256(text.encode()).digest()).random()

    def handle_error(self, request, address):
        """Say nothing of connections that a client has closed."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet: two would wait for each other

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][0]["content"]
        with server.lock:
            server.bodies.append(body)
            server.headers.append(self.headers)
            server.times[question] = server.times.get(question, 0) + 1
        shown = {name: text for name, _, text in re.findall(SHOWN, question)}
        reply = server.fault(self, question, shown) if server.fault else None
        if reply is None:
            reply = f"<think>[[A]]? [[B]]? [[tie]]?</think>\nBecause.\n[[{server.verdict(shown)}]]"
        if reply is not False:
            self.reply(reply)

    def reply(self, text, finish_reason="stop"):
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": finish_reason}
        self.send(200, {"id": "1", "object": "chat.completion", "created": 0, "model": "stub",
                        "choices": [choice]})  # fmt: skip

    def send(self, status, content, **headers):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextmanager
def serving(verdict=by_gold, fault=None):
    server = JudgeServer(verdict, fault)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
