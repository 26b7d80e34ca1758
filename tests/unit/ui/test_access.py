"""Who may use the page: tokens, hosts, origins, forms."""

import os
import stat

import pytest
from aiohttp.test_utils import make_mocked_request

from moorage.errors import UsageError
from moorage.ui.access import Access, RequestRefused, hosts_of, is_loopback, kept_token
from moorage.ui.run import UiSettings, listening

ACCESS = Access("t" * 32, hosts_of("127.0.0.1", 8465), is_tls=False)


def request(method="GET", **headers):
    return make_mocked_request(method, "/", headers={key.replace("_", "-"): value for key, value in headers.items()})


@pytest.mark.parametrize("host", ["127.0.0.1:8465", "localhost:8465", "[::1]:8465"])
def test_the_printed_address_and_its_other_names_are_answered(host):
    ACCESS.check_host(request(Host=host))


@pytest.mark.parametrize("host", ["evil.example:8465", "127.0.0.1", "127.0.0.1:80", "localhost:8465.evil.example", ""])
def test_a_name_that_leads_here_by_dns_is_refused(host):
    with pytest.raises(RequestRefused) as refused:
        ACCESS.check_host(request(Host=host))
    assert refused.value.status == 421


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:8465", "http://127.0.0.1:8466"])
def test_a_request_of_another_site_is_refused(origin):
    with pytest.raises(RequestRefused) as refused:
        ACCESS.check_host(request(Host="127.0.0.1:8465", Origin=origin))
    assert refused.value.status == 403


def test_without_the_cookie_nothing_is_answered():
    with pytest.raises(RequestRefused) as refused:
        ACCESS.check(request(Cookie=f"{ACCESS.cookie_name}={'0' * 64}"))
    assert refused.value.status == 401
    ACCESS.check(request(Cookie=f"{ACCESS.cookie_name}={ACCESS.cookie}"))


def test_a_form_without_an_origin_or_with_a_foreign_key_is_refused():
    cookie = f"{ACCESS.cookie_name}={ACCESS.cookie}"
    with pytest.raises(RequestRefused, match="which page"):
        ACCESS.check(request("POST", Cookie=cookie))
    ACCESS.check(request("POST", Cookie=cookie, Origin="http://127.0.0.1:8465"))
    with pytest.raises(RequestRefused, match="out of date"):
        ACCESS.check_form(ACCESS.cookie)
    ACCESS.check_form(ACCESS.form_key)


def test_cookie_and_form_key_do_not_give_the_token_away():
    assert len({ACCESS.token, ACCESS.cookie, ACCESS.form_key}) == 3


def test_a_token_is_kept_for_its_owner_only(tmp_path):
    path = tmp_path / "state" / "token"
    token = kept_token(path)
    assert len(token) >= 32
    assert kept_token(path) == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    with pytest.raises(UsageError, match="others may read it"):
        kept_token(path)


def test_a_token_is_not_read_through_a_link(tmp_path):
    (tmp_path / "secret").write_text("s" * 40)
    os.symlink(tmp_path / "secret", tmp_path / "token")
    with pytest.raises(UsageError):
        kept_token(tmp_path / "token")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"address": "0.0.0.0"}, "--tls-cert"),
        ({"address": "::"}, "--insecure"),
        ({"address": "example.org"}, "IP address"),
        ({"port": 99999}, "65535"),
        ({"tls_cert": "cert.pem"}, "go together"),
    ],
)
def test_settings_that_would_expose_the_page_are_refused(settings, words):
    with pytest.raises(UsageError, match=words):
        UiSettings(**settings).checked()


def test_beyond_loopback_a_plain_statement_is_enough():
    assert UiSettings(address="0.0.0.0", insecure=True).checked().insecure
    assert is_loopback("127.0.0.9")
    assert not is_loopback("10.0.0.1")


def test_a_page_takes_another_port_only_where_it_may():
    with listening("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with listening("127.0.0.1", port, 0) as other:
            assert other.getsockname()[1] != port
        with pytest.raises(UsageError, match=f"port {port}: Address already in use"):
            listening("127.0.0.1", port)
