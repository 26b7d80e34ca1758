"""The stubs say exactly what the wire tables of both CSI versions say."""

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from moorage.csi import csi_pb2, registration_pb2
from moorage.csi.generate import SOURCE_ROOT, generate

DATA = Path(__file__).parents[2] / "data"
TABLES = {
    "1.13": (json.loads((DATA / "csi-1.13.0.wire.json").read_text()), csi_pb2),
    "1.12": (json.loads((DATA / "csi-1.12.0.wire.json").read_text()), csi_pb2),
    "registration": (
        json.loads((DATA / "csi-pluginregistration-v1.wire.json").read_text()),
        registration_pb2,
    ),
}
SCALARS = {
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_BYTES: "bytes",
}

each_table = pytest.mark.parametrize(("table", "module"), TABLES.values(), ids=TABLES)


def marks(descriptor: Any, alpha: Any) -> list[str]:
    extensions = descriptor.GetOptions().Extensions
    found = []
    if isinstance(descriptor, FieldDescriptor) and extensions[csi_pb2.csi_secret]:
        found.append("secret")
    if extensions[alpha]:
        found.append("alpha")
    return sorted(found)


def type_of(field: FieldDescriptor) -> str:
    if field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            return f"map<{type_of(key)}, {type_of(value)}>"
        return str(field.message_type.full_name)
    if field.enum_type is not None:
        return str(field.enum_type.full_name)
    return SCALARS[field.type]


def field_row(field: FieldDescriptor) -> dict[str, Any]:
    row: dict[str, Any] = {"number": field.number, "name": field.name, "type": type_of(field)}
    if field.is_repeated and not row["type"].startswith("map<"):
        row["repeated"] = True
    if field.containing_oneof is not None:
        row["oneof"] = field.containing_oneof.name
    if found := marks(field, csi_pb2.alpha_field):
        row["options"] = found
    return row


def all_messages(module: Any) -> dict[str, Descriptor]:
    found: dict[str, Descriptor] = {}

    def walk(prefix: str, messages: Any) -> None:
        for message in messages:
            if message.GetOptions().map_entry:
                continue
            found[prefix + message.name] = message
            walk(f"{prefix}{message.name}.", message.nested_types)

    walk("", module.DESCRIPTOR.message_types_by_name.values())
    return found


def all_enums(module: Any) -> dict[str, EnumDescriptor]:
    found = dict(module.DESCRIPTOR.enum_types_by_name)
    for name, message in all_messages(module).items():
        found |= {f"{name}.{enum.name}": enum for enum in message.enum_types}
    return found


@each_table
def test_every_service_and_method_of_the_table_is_there(table, module):
    services = module.DESCRIPTOR.services_by_name
    assert {service["name"] for service in table["services"]} == set(services)
    for service in table["services"]:
        found = services[service["name"]]
        assert found.full_name == f"{table['package']}.{service['name']}"
        assert marks(found, csi_pb2.alpha_service) == service.get("options", [])
        for rpc in service["rpcs"]:
            method = found.methods_by_name[rpc["name"]]
            assert method.input_type.name == rpc["request"]
            assert method.output_type.name == rpc["response"]
            assert method.server_streaming == rpc.get("server_streaming", False)
            assert not method.client_streaming
            assert marks(method, csi_pb2.alpha_method) == rpc.get("options", []), rpc["name"]


@each_table
def test_every_field_of_the_table_has_its_number_type_and_marks(table, module):
    messages = all_messages(module)
    for message in table["messages"]:
        found = messages[message["name"]]
        assert marks(found, csi_pb2.alpha_message) == message.get("options", []), message["name"]
        for field in message["fields"]:
            assert field_row(found.fields_by_name[field["name"]]) == field, f"{message['name']}.{field['name']}"


@each_table
def test_every_enum_value_of_the_table_has_its_number_and_marks(table, module):
    enums = all_enums(module)
    for enum in table["enums"]:
        found = enums[enum["name"]]
        assert marks(found, csi_pb2.alpha_enum) == enum.get("options", [])
        for value in enum["values"]:
            there = found.values_by_name[value["name"]]
            assert there.number == value["number"]
            assert marks(there, csi_pb2.alpha_enum_value) == value.get("options", []), value["name"]


@pytest.mark.parametrize("names", [("1.13", "1.12"), ("registration",)], ids=["csi", "registration"])
def test_nothing_is_there_that_no_table_has(names):
    tables = [TABLES[name][0] for name in names]
    module = TABLES[names[0]][1]
    fields = {(m["name"], f["name"]) for table in tables for m in table["messages"] for f in m["fields"]}
    ours = {(name, field.name) for name, message in all_messages(module).items() for field in message.fields}
    assert ours == fields
    assert set(all_messages(module)) == {m["name"] for table in tables for m in table["messages"]}
    values = {(e["name"], v["name"]) for table in tables for e in table["enums"] for v in e["values"]}
    assert {(name, v.name) for name, enum in all_enums(module).items() for v in enum.values} == values
    rpcs = {(s["name"], r["name"]) for table in tables for s in table["services"] for r in s["rpcs"]}
    services = module.DESCRIPTOR.services_by_name.values()
    assert {(service.name, method.name) for service in services for method in service.methods} == rpcs


def test_generating_again_changes_nothing(tmp_path):
    written = generate(tmp_path)
    assert len(written) >= 9
    for file in written:
        committed = SOURCE_ROOT / file.relative_to(tmp_path)
        assert committed.read_text() == file.read_text(), f"{committed.name}: run python -m moorage.csi.generate"
