"""The Temporal client, with the data converter that every process must share, and the search attributes that runs use."""

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter

from contracts.runs import SearchAttribute
from infra.settings import Settings

_TYPES = {
    SearchAttribute.RUN: IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
    SearchAttribute.BATCH: IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
    SearchAttribute.TASK: IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
    SearchAttribute.OUTCOME: IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
    SearchAttribute.PHASE: IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
    SearchAttribute.REWARD: IndexedValueType.INDEXED_VALUE_TYPE_DOUBLE,
    SearchAttribute.ITERATION: IndexedValueType.INDEXED_VALUE_TYPE_INT,
}


async def connect(settings: Settings) -> Client:
    """Connect to the deployment's Temporal service. Raises RuntimeError if it does not answer."""
    return await Client.connect(settings.temporal_address, namespace=settings.temporal_namespace, data_converter=pydantic_data_converter)


async def ensure_search_attributes(client: Client) -> None:
    """Register the search attributes that are missing in the namespace; workflows that set an unknown one would stand still."""
    listed = await client.operator_service.list_search_attributes(ListSearchAttributesRequest(namespace=client.namespace))
    missing = {name.value: kind for name, kind in _TYPES.items() if name.value not in listed.custom_attributes}
    if missing:
        await client.operator_service.add_search_attributes(
            AddSearchAttributesRequest(namespace=client.namespace, search_attributes=missing)
        )
