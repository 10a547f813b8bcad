"""A server in a process of its own, reached through a real socket."""

import json
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Self

import httpx

PROC = pathlib.Path("/proc")
ROOT = pathlib.Path(__file__).parent.parent.parent


class ServerProcess:
    """`fake`: arguments of `FakeLLM`. `wait`: until the ready line is out; else only until it listens on `port`.
    `module`: the command."""

    module = "tests.server.fake_serve"

    def __init__(self, *flags: str, fake: dict[str, Any] | None = None, wait: bool = True, port: int = 0, env=None):
        overrides = ["--hf-overrides", json.dumps(fake)] if fake else []
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, "--port", str(port), *overrides, *flags],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.stdout: list[str] = []
        self.stderr: list[str] = []
        self._readers = [
            threading.Thread(target=lines.extend, args=(pipe,), daemon=True)
            for pipe, lines in ((self.process.stdout, self.stdout), (self.process.stderr, self.stderr))
        ]
        for reader in self._readers:
            reader.start()
        self.url = f"http://127.0.0.1:{port}"
        if wait:
            self.url = re.fullmatch(r"Ready: (http://\S+) \(model \S+, [\d.]+ s\)\n", self.first_line())[1]

    def first_line(self, seconds: float = 20) -> str:
        end = time.monotonic() + seconds
        while not self.stdout and self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        assert self.stdout, "".join(self.stderr)
        return self.stdout[0]

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20)

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def processes(self) -> list[int]:
        """Ids of the front and of the engine's process."""
        return [self.process.pid, *children(self.process.pid)]

    def wait(self, seconds: float = 15) -> int:
        """The exit code."""
        code = self.process.wait(seconds)
        for reader in self._readers:
            reader.join(5)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for reader in self._readers:
            reader.join(5)
        self.process.stdout.close()
        self.process.stderr.close()


def children(front: int) -> list[int]:
    """Ids of a process's own."""
    parents = {file.parent.name: file.read_text().rpartition(")")[2].split()[1] for file in PROC.glob("[0-9]*/stat")}
    return [int(pid) for pid, parent in parents.items() if parent == str(front)]


class EchoProcess(ServerProcess):
    """The real command with the echo engine."""

    module = "dcpjax.serve"

    def __init__(self, *flags: str, **more: Any):
        super().__init__("--engine", "echo", *flags, **more)


def metric(client: httpx.Client, name: str, **labels: str) -> float:
    """The value of a metric, summed over all labels that are not given."""
    total, found = 0.0, False
    for line in client.get("/metrics").text.splitlines():
        match = re.fullmatch(r"([a-z0-9_:]+)\{(.*)\} (\S+)", line)
        if match and match[1] == name and all(f'{key}="{value}"' in match[2] for key, value in labels.items()):
            total, found = total + float(match[3]), True
    assert found, name
    return total


def wait_for(condition, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def events(text: str) -> list[dict]:
    """The frames of a stream, which must end with [DONE]."""
    frames = text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
