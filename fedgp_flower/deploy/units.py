"""Files for service managers and containers that start a SuperLink or a SuperNode again whenever it ends."""

from __future__ import annotations

import getpass
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

UNIT = """[Unit]
Description=fedgp {name}
After=network-online.target
Wants=network-online.target

[Service]
User={user}
ExecStart={command}
Restart=always
RestartSec=15
NoNewPrivileges=true
PrivateTmp=true

[Install]
WantedBy=multi-user.target
"""

DOCKERFILE = """FROM python:3.11-slim
COPY . /fedgp
RUN pip install --no-cache-dir --constraint /fedgp/constraints.txt --editable /fedgp
ENTRYPOINT ["fedgp"]
"""
"""Built in the root of the project."""

COMPOSE = """services:
  {name}:
    build: {project}
    command: {command}
    restart: always
    volumes: ["{folder}:{folder}"]
{more}"""
HEALTHY = """    ports: ["{port}:{port}"]
    healthcheck:
      test: ["CMD", "fedgp", "deploy", "doctor", "--folder", "{folder}"]
      interval: 60s
"""


def write(folder: Path, name: str, words: Sequence[str], port: int | None) -> None:
    """Write a systemd unit, a compose file and a Dockerfile into the folder of a machine.

    Args:
        folder: Of the machine; containers see it under the same path.
        name: Of the service.
        words: Of ``fedgp``.
        port: To publish; None where nobody dials in.
    """
    project = Path(__file__).resolve().parents[2]
    command = shlex.join([sys.executable, "-m", "fedgp_flower.cli", *words]).replace("%", "%%")
    (folder / f"fedgp-{name}.service").write_text(UNIT.format(name=name, user=getpass.getuser(), command=command))
    more = "" if port is None else HEALTHY.format(port=port, folder=folder)
    text = COMPOSE.format(name=name, project=project, command=json.dumps(words), folder=folder, more=more)
    (folder / "compose.yaml").write_text(text)
    (folder / "Dockerfile").write_text(DOCKERFILE)
