"""A local server of S3's protocol, in the Python that ``make vllm-env`` creates."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import create_connection, create_server

from resolver_makers import PYTHON

BUCKET = "stacks"

# Copies a folder, as `aws s3 sync` does.
_FILL = """
import os, sys, pathlib, boto3
client, (bucket, prefix, folder) = boto3.client("s3"), sys.argv[1:]
if bucket not in [each["Name"] for each in client.list_buckets()["Buckets"]]:
    client.create_bucket(Bucket=bucket)
for path in pathlib.Path(folder).rglob("*"):
    if path.is_file():
        client.upload_file(str(path), bucket, f"{prefix}/{path.relative_to(folder).as_posix()}")
"""


def has_s3() -> bool:
    """Return whether that server is available."""
    return bool(list(PYTHON.parents[1].glob("lib/python*/site-packages/moto")))


@contextmanager
def s3_server(log: Path) -> Iterator[dict[str, str]]:
    """Run the server and yield the environment variables of its clients."""
    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [PYTHON, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stderr=output,
            stdout=output,
        )
    try:
        ends = time.monotonic() + 60
        while True:
            try:
                create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < ends
                time.sleep(0.1)
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-bucket",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        process.terminate()
        process.wait()


def copy_to(environment: dict[str, str], prefix: str, folder: Path) -> str:
    """Copy a folder below a prefix of the bucket and return its address."""
    subprocess.run(
        [PYTHON, "-c", _FILL, BUCKET, prefix, str(folder)],
        env={**os.environ, **environment},
        check=True,
    )
    return f"s3://{BUCKET}/{prefix}"
