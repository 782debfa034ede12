"""Atomic writes and checked reads: an interrupted write leaves the old content."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import tomllib
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python
from safetensors.numpy import load, save

from fedgp_flower.errors import ConfigError, DamagedError, FedGPError, RunError
from fedgp_flower.typing import Facts, Json, NamedArrays


def write_bytes(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write to a temporary file in the same folder, flush it, rename it to ``path``, flush the folder."""
    name = ""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(mode)
        os.replace(name, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException as error:
        if name:
            Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise RunError(f"cannot write {path}: {error.strerror}") from None
        raise


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, unless it is there. Raise RunError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make the folder {folder}: {error.strerror}; choose another") from None


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is created with its folder; wait for another process that holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_json(path: Path, content: Facts) -> None:
    """Write strictly valid JSON, with null for NaN and the infinities."""
    write_bytes(path, (json.dumps(plain(content), indent=2, allow_nan=False, ensure_ascii=False) + "\n").encode())


def write_arrays(path: Path, arrays: Facts) -> None:
    """Write named arrays as safetensors, in C order."""
    write_bytes(path, save({name: np.array(value, order="C") for name, value in arrays.items()}))


def read_toml(path: Path, hint: str = "") -> Json:
    """Read a TOML file that a person wrote. Raise ConfigError, with a ``hint`` if there is no such file."""
    try:
        return tomllib.loads(path.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}){hint}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def read_json(path: Path) -> Json:
    """Read a JSON object. Raise DamagedError if it is invalid."""
    try:
        return TypeAdapter(Json).validate_json(read_bytes(path))
    except ValidationError as error:
        raise DamagedError(f"{path} is not valid JSON of an object: {error.errors()[0]['msg']}") from None


def read_arrays(path: Path) -> NamedArrays:
    """Read named arrays from safetensors. Raise DamagedError if the file is invalid."""
    content = read_bytes(path)
    try:
        arrays: NamedArrays = load(content)
    except Exception as error:  # safetensors raises SafetensorError, KeyError or ValueError
        raise DamagedError(f"{path} is not a readable safetensors file: {error}") from None
    return arrays


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn unexpected exceptions while reading a run's file into DamagedError."""
    try:
        yield
    except FedGPError:
        raise
    except Exception as error:  # changed bytes can raise any exception
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{type(error).__name__} in {Path(place.filename).name}:{place.lineno}"
        raise DamagedError(f"{path} cannot be read as this version writes it ({where}): {error}"[:400]) from error


def plain(value: object) -> Any:
    """Convert a value to JSON's types: numpy scalars and arrays unpacked, None for numbers that are not finite."""
    return to_jsonable_python(value, inf_nan_mode="null", fallback=lambda array: array.tolist())


def read_bytes(path: Path) -> bytes:
    """Read a file of a run. Raise DamagedError if it is missing."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DamagedError(f"{path.name} is missing from {path.parent}") from None
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from None
