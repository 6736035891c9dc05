"""A repository in object storage, through fsspec. Models are copied to a private temporary folder to be loaded."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

import fsspec

from penstock.engines.errors import EngineError, InvalidRequestError, ModelNotFoundError
from penstock.gateway.configuration.config import ConfigError

# Where a repository lies: Triton's urls and environment variables as fsspec's protocols and options.
#
# Credentials come from the environment alone, never from a url, so that a url can be shown.

Service = Literal["s3", "gs", "as"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_SERVICES: dict[str, Service] = {"s3": "s3", "gs": "gs", "gcs": "gs", "as": "as", "az": "as", "abfs": "as"}
_S3_ENDPOINT = re.compile(r"(https?://)?([0-9A-Za-z.-]+|\[[0-9A-Fa-f:]+\]):([0-9]{1,5})/(.+)")
_AZURE_HOST = re.compile(r"([a-z0-9]{3,24})\.(?:blob|dfs)\.[a-z0-9.-]+")
_MOUNT_VARIABLES: dict[Service, str] = {
    "s3": "TRITON_AWS_MOUNT_DIRECTORY",
    "gs": "TRITON_GCS_MOUNT_DIRECTORY",
    "as": "TRITON_AZURE_MOUNT_DIRECTORY",
}


@dataclass(frozen=True, slots=True)
class CloudLocation:
    """What fsspec needs to know to reach a repository in object storage."""

    url: str
    """As it was given, without trailing slashes; holds no credentials."""
    protocol: str
    """fsspec's."""
    root: str
    """Bucket or container and the path below it, without a slash at either end."""
    extra: str
    """The extra of the package that brings the client."""
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    mount: str | None = None
    """The folder that copies are made in, or None for the system's own for temporary files."""


def parse_url(url: str, environ: Mapping[str, str]) -> Path | CloudLocation:
    """A local folder, or a place in object storage. Raises ConfigError."""
    match = _SCHEME.fullmatch(url)
    if match is None:
        if not url:
            raise ConfigError("a model repository cannot be an empty path")
        return Path(url)
    scheme, rest = match[1].lower(), match[2]
    if scheme == "file":
        return Path("/" + rest.lstrip("/"))
    service = _SERVICES.get(scheme)
    if service is None:
        raise ConfigError(f"a model repository cannot be at {scheme}://: a path, s3://, gs:// or as:// is expected")
    if any(character in rest for character in "@?#") or not rest.isprintable():
        raise ConfigError(
            f"the {scheme}:// url of a model repository has a '@', '?' or '#' in it: credentials belong in the"
            " environment"
        )
    shown = f"{scheme}://{rest.rstrip('/')}"
    credentials = _credentials(service, shown, environ)
    mount = environ.get(_MOUNT_VARIABLES[service]) or None
    if service == "s3":
        return _s3(shown, rest, credentials, mount)
    if service == "gs":
        root = _root(shown, rest)
        return CloudLocation(shown, "gcs", root, "gcs", _gcs_options(credentials, environ), mount)
    return _azure(shown, rest, credentials, mount)


def _root(shown: str, path: str) -> str:
    parts = [part for part in path.split("/") if part]
    if not parts or any(part in (".", "..") for part in parts):
        raise ConfigError(f"{shown} names no bucket or container")
    return "/".join(parts)


def _s3(shown: str, rest: str, credentials: Mapping[str, str], mount: str | None) -> CloudLocation:
    """`s3://bucket/path`, `s3://host:port/bucket/path` and `s3://https://host:port/bucket/path`; the scheme of a host
    without one is http, as in Triton."""
    client: dict[str, Any] = {}
    endpoint = _S3_ENDPOINT.fullmatch(rest.lstrip("/"))
    if endpoint:
        client["endpoint_url"] = f"{endpoint[1] or 'http://'}{endpoint[2]}:{endpoint[3]}"
        rest = endpoint[4]
    elif rest.startswith(("http://", "https://")):
        raise ConfigError(f"{shown} needs a port and a bucket: s3://https://host:port/bucket")
    if credentials.get("region"):
        client["region_name"] = credentials["region"]
    options: dict[str, Any] = {"client_kwargs": client}
    if endpoint:
        options["config_kwargs"] = {"s3": {"addressing_style": "path"}}
    if credentials.get("key_id") and credentials.get("secret_key"):
        options |= {"key": credentials["key_id"], "secret": credentials["secret_key"]}
        if credentials.get("session_token"):
            options["token"] = credentials["session_token"]
    elif credentials.get("profile"):
        options["profile"] = credentials["profile"]
    return CloudLocation(shown, "s3", _root(shown, rest), "s3", options, mount)


def _gcs_options(credentials: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, Any]:
    path = credentials.get("path") or environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    if not path:
        return {}
    if not Path(path).is_file():  # the client would take the path for a token, and send it to Google
        raise ConfigError("the key file that GOOGLE_APPLICATION_CREDENTIALS or the credential file names is not there")
    return {"token": path}


def _azure(shown: str, rest: str, credentials: Mapping[str, str], mount: str | None) -> CloudLocation:
    """`as://account/container/path`, the account also as its host name `account.blob.core.windows.net`."""
    host, _, path = rest.lstrip("/").partition("/")
    account_host = _AZURE_HOST.fullmatch(host)
    account = account_host[1] if account_host else host
    if not account:
        raise ConfigError(f"{shown} names no account and container: as://account/container")
    if credentials.get("account") and credentials["account"] != account:
        raise ConfigError(f"{shown} is not in the account that AZURE_STORAGE_ACCOUNT or the credential file names")
    options: dict[str, Any] = {"account_name": account}
    if account_host:
        options["account_host"] = host
    if credentials.get("account_key"):
        options["account_key"] = credentials["account_key"]
    else:
        options["anon"] = False  # adlfs then asks Azure's default chain: managed identity, environment, command line
    return CloudLocation(shown, "abfs", _root(shown, path), "azure", options, mount)


def _credentials(service: Service, url: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The entry of TRITON_CLOUD_CREDENTIAL_PATH's file whose key is the longest beginning of the url. Without that
    variable, what the environment says."""
    path = environ.get("TRITON_CLOUD_CREDENTIAL_PATH")
    if path:
        return _from_file(Path(path), service, url)
    if service == "s3":
        return {
            "key_id": environ.get("AWS_ACCESS_KEY_ID", ""),
            "secret_key": environ.get("AWS_SECRET_ACCESS_KEY", ""),
            "session_token": environ.get("AWS_SESSION_TOKEN", ""),
            "region": environ.get("AWS_DEFAULT_REGION", ""),
            "profile": environ.get("AWS_PROFILE", ""),
        }
    if service == "as":
        return {
            "account": environ.get("AZURE_STORAGE_ACCOUNT", ""),
            "account_key": environ.get("AZURE_STORAGE_KEY", ""),
        }
    return {}


def _from_file(path: Path, service: Service, url: str) -> dict[str, str]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"TRITON_CLOUD_CREDENTIAL_PATH: the file cannot be read: {type(error).__name__}") from None
    entries = document.get(service, {}) if isinstance(document, dict) else None
    if not isinstance(entries, dict):
        raise ConfigError("TRITON_CLOUD_CREDENTIAL_PATH: the file needs an object for each of gs, s3, as")
    matching = [prefix for prefix in entries if url.startswith(prefix)]
    if not matching:
        raise ConfigError(f"TRITON_CLOUD_CREDENTIAL_PATH: the file has no entry for {url}")
    entry = entries[max(matching, key=len)]
    if isinstance(entry, str):  # gs: the path of a key file
        return {"path": entry}
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise ConfigError(f"TRITON_CLOUD_CREDENTIAL_PATH: the entry of {service} for {url} is not an object of strings")
    if service == "as":
        return {"account": entry.get("account_str", ""), "account_key": entry.get("account_key", "")}
    return entry


_VERSION_KEYS = ("ETag", "etag", "md5Hash", "generation", "content_md5", "LastModified", "last_modified", "mtime")
"""What the stores call the things that change with a file's content."""
_SECRET_OPTIONS = ("key", "secret", "token", "account_key")
_MAX_DETAIL_CHARS = 200

_T = TypeVar("_T")


class CloudStorage:
    """Models are what lies below `root/<name>/`."""

    def __init__(self, location: CloudLocation, filesystem: Any = None) -> None:
        self.location = location
        self._fs = filesystem if filesystem is not None else _filesystem(location)

    def names(self) -> list[str]:
        root = self.location.root
        entries: list[dict[str, Any]] = self._try(lambda: self._fs.ls(root, detail=True), missing=EngineError)
        return sorted({PurePosixPath(entry["name"]).name for entry in entries if entry["type"] == "directory"})

    def fingerprint(self, name: str) -> str:
        digest = hashlib.sha256()
        for path, info in self._files(name).items():
            versions = [str(info[key]) for key in _VERSION_KEYS if info.get(key) is not None]
            digest.update("\0".join([path, str(info.get("size")), *versions, "\n"]).encode(errors="replace"))
        return digest.hexdigest()

    def fetch(self, name: str) -> Path:
        """A copy in a folder that only the server's user can read. The caller removes the folder's parent."""
        files = self._files(name)
        size = sum(info.get("size") or 0 for info in files.values())
        try:
            parent = Path(tempfile.mkdtemp(prefix="penstock-model-", dir=self.location.mount))
        except OSError as error:
            raise EngineError(f"no folder for a copy of model '{name}' can be made: {error.strerror}") from None
        try:
            if size > shutil.disk_usage(parent).free:
                raise EngineError(f"model '{name}' has {size} bytes, more than there is free disk space for its copy")
            folder = parent / name
            folder.mkdir()
            for path in files:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
            keys, targets = [info["name"] for info in files.values()], [str(folder / path) for path in files]
            self._try(partial(self._fs.get, keys, targets))  # lists are taken as they are: no wildcards in keys
        except BaseException:
            shutil.rmtree(parent, ignore_errors=True)
            raise
        return folder

    def _files(self, name: str) -> dict[str, dict[str, Any]]:
        """Every file of the model by its path below the model's folder, in a fixed order."""
        prefix = f"{self.location.root}/{name}"
        objects: dict[str, dict[str, Any]] = self._try(lambda: self._fs.find(prefix, detail=True))
        files: dict[str, dict[str, Any]] = {}
        for key, info in sorted(objects.items()):
            path = key.strip("/").removeprefix(prefix).lstrip("/")
            if path and info["type"] == "file" and not key.endswith("/"):
                files[_safe(path, name)] = info
        if not files:
            raise ModelNotFoundError(f"failed to find model '{name}' in the model repository")
        return files

    def _try(self, call: Callable[[], _T], missing: type[Exception] = ModelNotFoundError) -> _T:
        """Errors of the store in our words, with the url and without credentials."""
        try:
            self._fs.invalidate_cache()
            return call()
        except FileNotFoundError:
            raise missing(f"there is nothing at {self.location.url}, or it was removed while it was read") from None
        except Exception as error:  # each store has its own classes
            detail = f"{type(error).__name__}: {error}".partition("\n")[0]
            for option in _SECRET_OPTIONS:
                if self.location.options.get(option):
                    detail = detail.replace(str(self.location.options[option]), "***")
            raise EngineError(f"{self.location.url} cannot be read: {detail[:_MAX_DETAIL_CHARS]}") from None


def _safe(path: str, name: str) -> str:
    """Keys of object storage may hold anything; only those that stay below the copy's folder become files."""
    parts = path.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts) or any(
        len(part.encode()) > 255 for part in parts
    ):
        raise InvalidRequestError(f"model '{name}' has a file in its repository whose path cannot be on a disk")
    return path


def _filesystem(location: CloudLocation) -> Any:
    try:
        return fsspec.filesystem(
            location.protocol, skip_instance_cache=True, use_listings_cache=False, **location.options
        )
    except ImportError:
        raise ConfigError(
            f"{location.url} needs a package that is not installed: pip install 'penstock-server[{location.extra}]'"
        ) from None
    except Exception as error:
        raise ConfigError(f"{location.url} cannot be used: {type(error).__name__}") from None
