"""What the proxy refuses, and why. Messages are written for the harness's user and never hold a credential."""

from contracts.failures import Limit


class ProxyError(Exception):
    """A request that gets no answer. `status` and `code` are OpenAI's; each dialect puts them into its own form."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class BadRequestError(ProxyError):
    """The request cannot be answered as it stands; sending it again changes nothing."""

    status = 400
    code = "invalid_request_error"


class TooLargeError(BadRequestError):
    """The body is larger than the proxy reads."""

    status = 413
    code = "request_too_large"


class UnauthorizedError(ProxyError):
    """No such credential, or the session is closed. Both look alike, so that nothing is learned by trying."""

    status = 401
    code = "invalid_api_key"

    def __init__(self) -> None:
        super().__init__("The API key is not one of an open session.")


class LimitReachedError(ProxyError):
    """The session has used what it may. A 400, because harnesses retry 429 and 5xx but stop at a 400 (docs/proxy.md)."""

    status = 400

    def __init__(self, limit: Limit, message: str) -> None:
        super().__init__(message)
        self.limit = limit
        self.code = "context_length_exceeded" if limit is Limit.CONTEXT else "session_limit_reached"


class ReplayDivergedError(ProxyError):
    """The session may only follow a record, and the harness asks otherwise. A 400, because harnesses stop at it (docs/proxy.md)."""

    status = 400
    code = "replay_diverged"


class EngineUnavailableError(ProxyError):
    """No engine answered before the session's deadline, or the engine refuses the request for good."""

    status = 503
    code = "engine_unavailable"


class AnswerCutError(ProxyError):
    """The engine died when part of its answer had been shown: that part is void, and the harness has to ask again."""

    status = 502
    code = "answer_cut"


class JournalUnavailableError(ProxyError):
    """The call was sampled but cannot be made durable, so it is not answered."""

    status = 503
    code = "journal_unavailable"
