"""Settings: the contract's file, the environment, and errors that name key and value."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import SecretStr

from driftwatch.errors import SettingsError
from driftwatch.settings import Settings, leaves, load, reference, secret

ROOT = Path(__file__).parents[2]

CONTRACT = """
engine:   {url: "http://127.0.0.1:8000", kind: auto}
tap:      {listen: "0.0.0.0:8080", admin: "127.0.0.1:9465", control_url: "http://127.0.0.1:9464"}
control:  {listen: "127.0.0.1:9464", token: null, metrics_listen: null}
store:    {url: "sqlite:///driftwatch.db"}
models:   [{name: "*", target: null, tokenizer: null, drafts: [{name: incumbent, path: null}], gamma: 5, rule: argmax}]
shadow:   {device: auto, dtype: auto}
sampling: {per_window: 8, window_s: 15, tokens_per_day: null}
segments: [{label: tenant, header: x-tenant}, {label: prompt_bytes, bucket: [2048, 16384]}]
detect:
  baseline: {mode: auto, min_requests: 500, min_hours: 24}
  tolerance: 0.03
  requests_between_false_alarms: 100000
retention: {payload_days: 7, replay_days: 90, text: false}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    return path


def test_the_defaults_are_the_contract(tmp_path: Path) -> None:
    assert load(write(tmp_path, CONTRACT)) == load(None) == Settings()


def test_the_environment_wins_key_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIFTWATCH_ENGINE__URL", "http://engine:1/")
    monkeypatch.setenv("DRIFTWATCH_DETECT__BASELINE__MIN_REQUESTS", "77")
    monkeypatch.setenv("DRIFTWATCH_MODELS", '[{"name": "m", "gamma": 3}]')
    settings = load(write(tmp_path, "engine: {url: 'http://file', kind: vllm}\ndetect: {tolerance: 0.1}"))
    assert (settings.engine.url, settings.engine.kind) == ("http://engine:1", "vllm")
    assert (settings.detect.baseline.min_requests, settings.detect.tolerance) == (77, 0.1)
    assert settings.models[0].gamma == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine: {ulr: x}", "unknown key `engine.ulr`, did you mean `url`"),
        ("modles: []", "unknown key `modles`, did you mean `models`"),
        ("models: [{name: a, drafts: [{nam: b}]}]", "unknown key `models.0.drafts.0.nam`, did you mean `name`"),
        ("engine: {url: nowhere}", "`engine.url`: .*got 'nowhere'"),
        ("tap: {listen: '8080'}", "`tap.listen`: write host:port.*got '8080'"),
        ("control: {listen: '0.0.0.0:9464'}", "is not loopback: set control.token"),
        ("detect: {tolerance: 0}", "`detect.tolerance`: .*got 0"),
        ("detect: {baseline: {mode: value}}", "mode 'value' and the key 'value' belong together"),
        ("segments: [{label: prompt_bytes}]", "needs bucket edges"),
        ("segments: [{label: tenant}]", "'tenant' needs a header or a json_path"),
        ("segments: [{label: a, header: b, bucket: [2, 1]}]", "must rise"),
        ("models: [{name: a, rule: maybe}]", "`models.0.rule`: .*got 'maybe'"),
        ("control: {token: '', listen: '0.0.0.0:9464'}", "`control.token`: .*at least 1"),
        ("webhooks: [{name: a, url: 'http://x'}, {name: a, url: 'http://y'}]", "webhooks: name 'a' is given 2 times"),
        ("models: [{name: m, drafts: [{name: a}, {name: a}]}]", "drafts of model 'm': name 'a' is given 2 times"),
        ("1: 2", "unknown key `1`"),
        ("- a\n- b", "the file must hold keys"),
        ("engine: {", "not YAML"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_key_and_value(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        load(write(tmp_path, text))
    assert "settings.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mistyped_variable_is_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIFTWATCH_ENGIN__URL", "http://x")
    with pytest.raises(SettingsError, match="DRIFTWATCH_ENGIN__URL names no setting"):
        load(None)


def test_the_variables_that_kubernetes_sets_for_services_are_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DRIFTWATCH_PORT", "DRIFTWATCH_CONTROL_SERVICE_HOST", "DRIFTWATCH_TAP_PORT_8080_TCP_ADDR"):
        monkeypatch.setenv(name, "10.0.0.1")
    assert load(None) == Settings()


@pytest.mark.parametrize(
    "text", ["control: {token: 123456789}", "webhooks: [{name: a, url: 'http://x', secrets: whsec_S}]"]
)
def test_an_error_never_shows_a_secret(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(write(tmp_path, text))
    assert "123456789" not in str(caught.value)
    assert "whsec_S" not in str(caught.value)


def test_masked_settings_hold_no_secret(tmp_path: Path) -> None:
    text = """
    engine: {url: "http://user:hunter2@engine:1/path"}
    store: {url: "postgresql+psycopg://dw:hunter2@db/x?password=hunter2&port=1"}
    webhooks: [{name: a, url: "https://:hunter2@hook/?token=hunter2", secrets: [whsec_hunter2]}]
    control: {token: hunter2}
    """
    masked = str(load(write(tmp_path, text)).masked())
    assert "hunter2" not in masked
    assert "@engine:1/path" in masked
    assert "port=1" in masked


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://[::1]:8000/v1", "http://[::1]:8000/v1"),
        ("http://user@engine:8000", "http://user@engine:8000"),
        ("http://user:p%40ss@engine:8000/a@b", "http://user:***@engine:8000/a@b"),
        ("http://engine/?token=a/b@c&x=1", "http://engine/?token=***&x=1"),
        ("http://user:p@ss@engine:8000", "http://user:***@engine:8000"),
    ],
)
def test_only_the_password_of_a_url_is_masked(url: str, masked: str) -> None:
    assert Settings(engine={"url": url}).masked()["engine"]["url"] == masked


def test_a_password_with_a_slash_in_the_stores_url_is_masked() -> None:
    settings = Settings(store={"url": "postgresql+psycopg://dw:hun/ter2@db:5432/x"})
    assert settings.masked()["store"]["url"] == "postgresql+psycopg://dw:***@db:5432/x"


def test_a_list_in_the_environment_that_is_not_json_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIFTWATCH_MODELS", "a,b")
    with pytest.raises(SettingsError, match="lists are written as JSON"):
        load(None)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        load(tmp_path / "none.yaml")


def test_secrets_come_from_files_too(tmp_path: Path) -> None:
    path = write(tmp_path, " s3cret \n")
    assert secret(None, path, "control.token_file") == "s3cret"
    assert secret(SecretStr("a"), path, "control.token_file") == "a"
    with pytest.raises(SettingsError, match="`control.token_file`: .*is empty"):
        secret(None, write(tmp_path, ""), "control.token_file")


def test_every_key_is_documented_and_the_readme_has_the_table() -> None:
    assert all(field.description for _, field in leaves())
    assert reference() in (ROOT / "README.md").read_text(), "run `python -m driftwatch.settings` and update README.md"


def test_the_readmes_example_is_valid(tmp_path: Path) -> None:
    blocks = (ROOT / "README.md").read_text().split("```yaml")[1:]
    assert blocks
    for block in blocks:
        text = block.split("```")[0]
        assert load(write(tmp_path, text)) != yaml.safe_load(text)
