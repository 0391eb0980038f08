PYTHON ?= python3.11
BIN := .venv/bin
GOOGLEAPIS = $(shell $(BIN)/python -c "import google.rpc, pathlib; print(pathlib.Path(list(google.rpc.__path__)[0]).parents[1])")
PROTOS := $(wildcard proto/rankbook/v1/*.proto)

.PHONY: proto
proto:
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m grpc_tools.protoc -Iproto -I$(GOOGLEAPIS) \
	  --python_out=client --grpc_python_out=client --mypy_out=quiet:client --mypy_grpc_out=quiet:client $(PROTOS)
	cd client/rankbook/v1 && for p in calls record session storage topology transfer; do rm -f $${p}_pb2_grpc.py $${p}_pb2_grpc.pyi; done
