"""Wire formats: one file each, all of the same shape (`base`). The route chooses the dialect; a harness declares nothing."""

from typing import Final

from proxy.dialects.base import Dialect
from proxy.dialects.chat import ChatCompletions
from proxy.dialects.completions import Completions
from proxy.dialects.gemini import Gemini
from proxy.dialects.messages import Messages
from proxy.dialects.responses import Compact, Responses

DIALECTS: Final[tuple[Dialect, ...]] = (ChatCompletions(), Responses(), Compact(), Messages(), Gemini(), Completions())
