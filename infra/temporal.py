"""The Temporal client, with the data converter that every process must share."""

from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter

from infra.settings import Settings


async def connect(settings: Settings) -> Client:
    """Connect to the deployment's Temporal service. Raises RuntimeError with the address if it does not answer."""
    return await Client.connect(settings.temporal_address, namespace=settings.temporal_namespace, data_converter=pydantic_data_converter)
