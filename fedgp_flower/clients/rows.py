"""The rows with which a site entered a run: where its table is another one later, the site itself refuses to answer.

What is kept is HMAC(salt, table): a hash with a salt drawn for the run, so that neither says anything of the rows to
anybody who does not have them. Both stay at the site, in the node's Context and, with ``state-dir``, in a file.
"""

from __future__ import annotations

import hmac
import json
import secrets
from pathlib import Path

from flwr.app import ConfigRecord, Context

from fedgp_flower.data.sites import RawSite
from fedgp_flower.errors import DataError, RunError
from fedgp_flower.files import read_json, write_bytes
from fedgp_flower.lazy import pd
from fedgp_flower.records import record_of

RECORD, FILE = "site-rows", "site-rows.json"


def require_same_rows(context: Context, run: str, site: RawSite) -> None:
    """Remember the rows of a real site at its first message of a run, and refuse others later.

    Raises:
        DataError: the table changed while the run went on.
    """
    if site.simulated:
        return
    kept = _kept(context)
    if kept.get("run") != run:
        salt = secrets.token_hex(16)
        _keep(context, {"run": run, "salt": salt, "rows": _fingerprint(site, salt)})
    elif not hmac.compare_digest(kept["rows"], _fingerprint(site, kept["salt"])):
        table = Path(str(context.node_config.get("data-path", "the table"))).name
        raise DataError(
            f"{table} is no longer the table with which this site entered the run; put that one back, or start a new"
            " run with this one"
        )


def _fingerprint(site: RawSite, salt: str) -> str:
    digest = hmac.new(bytes.fromhex(salt), digestmod="sha256")
    for frame in (site.train, site.test):
        digest.update(json.dumps([list(map(str, frame.columns)), len(frame)]).encode())
        digest.update(pd.util.hash_pandas_object(frame, index=False).to_numpy().tobytes())
    return digest.hexdigest()


def _kept(context: Context) -> dict[str, str]:
    record = record_of(context.state, RECORD, ConfigRecord)
    if record is not None:
        return {name: str(value) for name, value in record.items()}
    try:
        path = _file(context)
        return {} if path is None else {name: str(value) for name, value in read_json(path).items()}
    except RunError:
        return {}


def _keep(context: Context, facts: dict[str, str]) -> None:
    path = _file(context)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, json.dumps(facts).encode(), mode=0o600)
    context.state[RECORD] = ConfigRecord(dict(facts))


def _file(context: Context) -> Path | None:
    folder = context.node_config.get("state-dir")
    return None if not folder else Path(str(folder)).expanduser() / FILE
