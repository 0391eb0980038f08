#!/bin/sh
# Generates the Python code of proto/ into the folder given. One protoc call:
# the folders of proto/ are the Python packages, so nothing is rewritten.
set -eu
out=$1
bin=${RANKBOOK_BIN:-$PWD/.venv/bin}
include=$("$bin/python" -c 'import google.rpc, pathlib; print(pathlib.Path(list(google.rpc.__path__)[0]).parents[1])')
PATH="$bin:$PATH" "$bin/python" -m grpc_tools.protoc -Iproto -I"$include" \
  --python_out="$out" --grpc_python_out="$out" \
  --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" \
  proto/rankbook/v1/*.proto
# Only the service has stubs; the others are empty modules.
for name in calls record session storage topology transfer; do
  rm -f "$out/rankbook/v1/${name}_pb2_grpc.py" "$out/rankbook/v1/${name}_pb2_grpc.pyi"
done
