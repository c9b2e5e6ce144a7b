"""``/ui``: the page's routes, its login, and what a browser may do with it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment, PackageLoader, StrictUndefined
from sqlalchemy.orm import Session

import driftwatch
from driftwatch.control.leader import Leader
from driftwatch.control.page import words
from driftwatch.control.page.door import COOKIE, VALID_S, Door
from driftwatch.control.page.overview import overview
from driftwatch.control.page.segment import segment_page
from driftwatch.control.page.story import story
from driftwatch.errors import StoreError
from driftwatch.records import segment_labels
from driftwatch.settings import Settings
from driftwatch.store.connection import Store

log = logging.getLogger(__name__)

FILES = {"page.css": "text/css", "page.js": "text/javascript", "page.svg": "image/svg+xml"}
FORM_BYTES = 8192
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",  # addresses hold labels, which may name people
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def environment() -> Environment:
    """Everything that users or engines wrote is escaped; a name that is missing is an error, not an empty place."""
    found = Environment(
        loader=PackageLoader("driftwatch.control.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        name: getattr(words, name)
        for name in (
            "capitalize_first",
            "kind",
            "metric",
            "action",
            "plain",
            "number",
            "count",
            "estimate",
            "time",
            "duration",
            "pretty",
        )
    }
    found.filters["labels"] = segment_labels
    found.globals["version"] = driftwatch.__version__
    return found


def router(store: Store, settings: Settings, token: str | None, leader: Leader) -> APIRouter:
    """The page; where there is a token, whoever shows no cookie for it sees the login instead."""
    routes = APIRouter(prefix="/ui", include_in_schema=False)
    door = Door(token, time.time)
    templates = environment()

    def show(template: str, status: int = 200, **values: Any) -> HTMLResponse:
        text = templates.get_template(template).render(locked=door.locked, **values)
        return HTMLResponse(text, status, HEADERS)

    def guarded(request: Request, template: str, read: Callable[[Session], Any]) -> Response:
        """Rendered while the session is open, so that one page shows one state of the store."""
        if not door.lets_in(request.cookies.get(COOKIE)):
            return RedirectResponse(f"/ui/login?{urlencode({'next': _path(request)})}", 303, HEADERS)
        try:
            with store.read() as session:
                found = read(session)
                if found is None:
                    return show("problem.html", 404, said="There is nothing of that name, or retention has deleted it.")
                return show(template, page=found)
        except StoreError as error:
            log.error("%s", error)
            return show("problem.html", 503, said=f"The store does not answer: {error}")

    @routes.get("")
    def get_overview(request: Request) -> Response:
        return guarded(
            request, "overview.html", lambda session: overview(session, settings, leads=leader.leads, now=time.time())
        )

    @routes.get("/segments/{id:path}")
    def get_segment(request: Request) -> Response:
        id = unquote(_path(request).partition("/segments/")[2])
        return guarded(request, "segment.html", lambda session: segment_page(session, settings, id, time.time()))

    @routes.get("/events/{id}")
    def get_event(id: str, request: Request) -> Response:
        return guarded(request, "event.html", lambda session: story(session, id))

    @routes.get("/files/{name}")
    def get_file(name: str) -> Response:
        if name not in FILES:
            return show("problem.html", 404, said="There is no such file.")
        text = (Path(__file__).parent / "static" / name).read_bytes()
        return Response(text, media_type=FILES[name], headers=HEADERS | {"cache-control": "no-cache"})

    @routes.get("/login")
    def get_login(request: Request) -> Response:
        if door.lets_in(request.cookies.get(COOKIE)):
            return RedirectResponse("/ui", 303, HEADERS)
        return show("login.html", next=_after(request.query_params.get("next", "")), problem=None)

    @routes.post("/login")
    async def post_login(request: Request) -> Response:
        address = request.client.host if request.client else ""
        fields = parse_qs((await _body(request)).decode("utf-8", "replace"))
        given, after = fields.get("token", [""])[0], _after(fields.get("next", [""])[0])
        if wait := door.wait_s(address):
            said = f"Too many wrong tokens: try again in {wait} s."
            refused = show("login.html", 429, next=after, problem=said)
            refused.headers["retry-after"] = str(wait)
            return refused
        cookie = door.cookie(given)
        if cookie is None:
            door.failed(address)
            log.warning("the page was asked for with a wrong token from %s", address)
            return show("login.html", 403, next=after, problem="That is not the token of this control.")
        answer = RedirectResponse(after, 303, HEADERS)
        secure = request.url.scheme == "https"
        answer.set_cookie(COOKIE, cookie, max_age=VALID_S, path="/ui", httponly=True, samesite="strict", secure=secure)
        return answer

    @routes.post("/logout")
    def post_logout() -> Response:
        answer = RedirectResponse("/ui", 303, HEADERS)
        answer.delete_cookie(COOKIE, path="/ui", httponly=True, samesite="strict")
        return answer

    return routes


def _path(request: Request) -> str:
    """As it was asked for. Ids of segments are percent-encoded themselves, so how often a path is decoded matters."""
    path: bytes = request.scope["raw_path"]
    return path.decode("latin-1")


def _after(path: str) -> str:
    """Where to go after the login: nowhere but to the page."""
    return path if path.startswith("/ui/") else "/ui"


async def _body(request: Request) -> bytes:
    """As much of a form as a token needs."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > FORM_BYTES:
            return b""
    return body
