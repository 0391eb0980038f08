#!/bin/sh
# Generates the Python code of proto/ into the two folders given, the client's
# and the server's. The folders of proto/ are the Python packages, so nothing is
# rewritten.
set -eu
out=$1
server=$2
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
# etcd's wire goes with the server. Its methods are called by their paths.
PATH="$bin:$PATH" "$bin/python" -m grpc_tools.protoc -Iproto \
  --python_out="$server" --mypy_out=quiet:"$server" \
  proto/rankbook_server/etcd/etcd.proto
