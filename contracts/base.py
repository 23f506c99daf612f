"""The base of every model that crosses a process border."""

from pydantic import BaseModel, ConfigDict


class Contract(BaseModel):
    """A message or configuration: unknown keys are errors, never ignored.

    A field that is misspelt must not silently become a default; a peer of another version must say so at once.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class FrozenContract(Contract):
    """A contract that is a value: hashable, never changed after it was made."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
