"""One shape for every error that control answers: ``{"error": {"code", "message", "hint"}}``."""

from __future__ import annotations

import logging
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from driftwatch.errors import RecordError, StoreError

log = logging.getLogger(__name__)


class Problem(Exception):
    """An answer other than success: HTTP status, a code for programs, a message and a hint for people."""

    def __init__(self, status: int, code: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.hint = status, code, message, hint

    def response(self) -> JSONResponse:
        error = {"code": self.code, "message": self.message, "hint": self.hint}
        headers = {"www-authenticate": "Bearer"} if self.status == HTTPStatus.UNAUTHORIZED else None
        return JSONResponse({"error": error}, self.status, headers)


def install(app: FastAPI) -> None:
    """Turn every error into that shape, those of the framework too."""

    @app.exception_handler(Problem)
    async def _problem(_request: Request, error: Problem) -> JSONResponse:
        return error.response()

    @app.exception_handler(StoreError)
    async def _store(_request: Request, error: StoreError) -> JSONResponse:
        log.error("%s", error)
        hint = "nothing of this request was stored; send it again later"
        return Problem(503, "store_unavailable", str(error), hint).response()

    @app.exception_handler(RecordError)
    async def _value(_request: Request, error: RecordError) -> JSONResponse:
        return Problem(400, "invalid_parameter", str(error), "correct the parameter").response()

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
        message = f"{request.method} {request.url.path}: {error.detail}"
        return Problem(error.status_code, code, message, "GET /openapi.json lists what there is").response()

    @app.exception_handler(RequestValidationError)
    async def _validation(_request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return Problem(422, "invalid_parameter", f"{where}: {first['msg']}", "correct the parameter").response()

    @app.exception_handler(Exception)
    async def _bug(request: Request, error: Exception) -> JSONResponse:
        log.exception("bug in %s %s", request.method, request.url.path)
        return Problem(500, "internal", f"{type(error).__name__}", "see control's log").response()
