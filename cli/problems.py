"""A user's mistake: told in a sentence, without a traceback, with exit code 2."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from pydantic import BaseModel, ValidationError


class UserError(Exception):
    """Says what is wrong, where, and what is allowed."""


def explain(error: ValidationError, model: type[BaseModel], where: str) -> UserError:
    """Pydantic's findings as a person would put them: the key, the value, what is allowed."""
    lines = []
    for found in error.errors():
        location = [part for part in found["loc"] if not (isinstance(part, str) and part[:1].isupper())]
        key = ".".join(map(str, location)) or "the file"
        if found["type"] == "extra_forbidden":
            lines.append(f"{key}: unknown key{_suggestion(str(location[-1]), _keys_at(model, location[:-1]))}")
        elif found["type"] == "missing":
            lines.append(f"{key}: missing")
        else:
            value = repr(found["input"])
            shown = value if len(value) <= 80 else f"{value[:77]}…"
            lines.append(f"{key}: {found['msg'].removeprefix('Value error, ')}" + ("" if key == "the file" else f" (it is {shown})"))
    return UserError(f"{where}:\n" + "\n".join(f"  {line}" for line in lines))


def _suggestion(key: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = get_close_matches(key, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{hint} (known here: {', '.join(names)})" if names else hint


def _keys_at(model: type[BaseModel], location: Sequence[object]) -> list[str]:
    """Field names of the model at a location of nested models."""
    current: type[BaseModel] | None = model
    for part in location:
        field = current.model_fields.get(str(part)) if current else None
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())] if field else []
        current = next((kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    return list(current.model_fields) if current else []
