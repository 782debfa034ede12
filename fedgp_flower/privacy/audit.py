"""A site's audit log: a JSON line for each reply, with the hash of the previous line, so that edits are detected.

The hash chain has no key: a person with write access can forge a whole log. To detect that, keep the last hash
elsewhere: ``fedgp audit FILE`` prints it, and ``--seen HASH`` searches for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import syslog
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord

from fedgp_flower.errors import FedGPError, RunError
from fedgp_flower.files import write_bytes
from fedgp_flower.privacy.policy import Decision
from fedgp_flower.records import bytes_of, config_of, numpy_arrays
from fedgp_flower.typing import Facts

BEGINNING = "0" * 64
ECHOED_TEXTS = ("site", "run")
"""Texts of every reply, which the other columns show or all lines share."""
NOTHING = {"line": 0, "hash": BEGINNING, "before": ""}


def log_of(node_config: Facts) -> Path | None:
    """Return the path of a node's log: ``audit``, else ``audit.jsonl`` in the ``state-dir`` of a real site."""
    if node_config.get("audit"):
        return Path(str(node_config["audit"])).expanduser()
    if node_config.get("state-dir") and "partition-id" not in node_config:
        return Path(str(node_config["state-dir"])).expanduser() / "audit.jsonl"
    return None


def record(
    path: Path, message: Message, reply: Message, decisions: Sequence[Decision], masked: bool, copy: str = ""
) -> None:
    """Append a reply to the log before it is sent; ``copy`` is ``syslog`` or a second file."""
    content, asked, said = reply.content, config_of(message), config_of(reply)
    arrays = numpy_arrays(content.array_records.get("arrays", ArrayRecord()))
    numbers: dict[str, float] = {}
    for name, value in content.metric_records.get("metrics", MetricRecord()).items():
        if isinstance(value, list):
            arrays[name] = np.asarray(value)
        else:
            numbers[name] = value
    line = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "run": asked.get("run", ""),
        "round": asked.get("round", -1),
        "kind": message.metadata.message_type,
        "masked": masked,
        "arrays": {name: _shape_and_norm(entry) for name, entry in arrays.items()},
        "numbers": numbers,
        "texts": {name: len(value) for name, value in said.items() if isinstance(value, str) and name != "error"},
        "bytes": bytes_of(content),
        "refused": said.get("error", ""),
        "rules": [asdict(entry) for entry in decisions],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            text = _append(file, path, line)
            if copy == "syslog":
                syslog.syslog(syslog.LOG_INFO | syslog.LOG_AUTH, f"fedgp {text}")
            elif copy:
                with Path(copy).open("a", encoding="utf-8") as second:
                    second.write(text)
    except OSError as error:
        raise RunError(f"the audit log of this site cannot be written ({error.strerror})") from error
    except FedGPError as error:
        raise RunError(f"the audit log of this site cannot be written ({error})") from error
    except (ValueError, KeyError) as error:
        raise RunError(f"the audit log of this site cannot be written ({type(error).__name__})") from error


def _shape_and_norm(array: np.ndarray) -> dict[str, object]:
    """Return shape and Euclidean norm; the norm is None for masked arrays and arrays that are not finite."""
    norm = float(np.linalg.norm(array.ravel())) if array.dtype.kind in "fi" else float("nan")
    return {"shape": list(array.shape), "norm": norm if np.isfinite(norm) else None}


def _append(file: FileIO, path: Path, line: Facts) -> str:
    """Append a whole line and return it; if writing fails, remove the part that was written."""
    last = _last_line(file)
    previous: Facts = json.loads(last) if last else NOTHING
    if problem := _broken_end(path, previous):
        raise RunError(f"{problem}; see `fedgp audit`, then move {path.name} and its .head away")
    number = previous["line"] + 1
    text = json.dumps({"line": number, **line, "before": previous["hash"]})
    digest = hashlib.sha256(text.encode()).hexdigest()
    end = file.seek(0, os.SEEK_END)
    try:
        whole = f'{text[:-1]}, "hash": "{digest}"}}\n'
        rest = whole.encode()
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
        write_bytes(path.with_name(f"{path.name}.head"), f"{number} {digest}\n".encode())
    except BaseException:
        file.truncate(end)
        raise
    return whole


def _last_line(file: FileIO) -> bytes:
    """Return the last complete line; truncate an incomplete line after it, whose reply was never sent."""
    end = file.seek(0, os.SEEK_END)
    size = 4096
    while True:
        file.seek(max(0, end - size))
        *lines, incomplete = file.read().split(b"\n")
        if len(lines) > 1 or size >= end:
            file.truncate(end - len(incomplete))
            return lines[-1] if lines else b""
        size *= 2


def _broken_end(path: Path, last: Facts) -> str:
    """Return how the last line differs from ``.head``; it may be one ahead, after a crash between the two writes."""
    head, count, digest = path.with_name(f"{path.name}.head"), 0, BEGINNING
    try:
        if head.exists():
            number, digest = head.read_text(encoding="ascii").split()
            count = int(number)
    except (OSError, ValueError):
        return f"{head.name} was changed: expected the number of the last line and its hash"
    if (count, digest) in ((last["line"], last["hash"]), (last["line"] - 1, last["before"])):
        return ""
    had = f"the log had {count} lines" if head.exists() else f"{head.name} is missing"
    return f"{had}; the last lines were removed or replaced, or lines were added"


def cells(line: Facts) -> list[str]:
    """Return a line of the log as a row of a table."""
    arrays = ", ".join(f"{name} {entry['shape']}" for name, entry in line["arrays"].items())
    not_passed = [f"{entry['rule']} {entry['verdict']}" for entry in line["rules"] if entry["verdict"] != "passed"]
    rules = ", ".join(not_passed) or f"{len(line['rules'])} passed"
    further = ", ".join([*line["numbers"], *(name for name in line["texts"] if name not in ECHOED_TEXTS)])
    sent = "; ".join(filter(None, (arrays, further)))
    plain = (line["line"], line["time"], line["run"], line["round"], line["kind"], line["bytes"])
    return [*map(str, plain), "yes" if line["masked"] else "no", line["refused"] or sent, rules]


def read(path: Path, seen: str = "") -> tuple[list[Facts], list[str], str]:
    """Return the readable lines of a log, the problems found in it, and its last hash.

    It is a problem if no line has a hash that starts with ``seen``.
    """
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({type(error).__name__})") from None
    lines: list[Facts] = []
    problems = list(_verified(texts, lines))
    hashes = [str(line.get("hash")) for line in lines]
    if problem := _broken_end(path, lines[-1] if lines else NOTHING):
        problems.append(problem)
    if seen and not any(entry.startswith(seen) for entry in hashes):
        problems.append(f"no line has the hash {seen}: that line was removed or replaced")
    return lines, problems, hashes[-1] if hashes else BEGINNING


def _verified(texts: Sequence[str], lines: list[Facts]) -> Iterator[str]:
    """Yield the problem of each bad line, and add the readable lines to ``lines``."""
    previous_hash, previous_number = BEGINNING, 0
    for place, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            digest, number, before = line["hash"], int(line["line"]), line["before"]
        except (ValueError, KeyError, TypeError):
            yield f"line {place}: cannot be read"
            previous_number += 1
            continue
        lines.append(line)
        plain = text.removesuffix(f', "hash": "{digest}"}}') + "}"
        if hashlib.sha256(plain.encode()).hexdigest() != digest:
            yield f"line {place}: was edited"
        elif number != previous_number + 1:
            yield f"line {place}: is numbered {number} after {previous_number}; lines were removed or moved"
        elif before != previous_hash:
            yield f"line {place}: does not have the hash of the previous line, which was replaced"
        previous_hash, previous_number = digest, number
