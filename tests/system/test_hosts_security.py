"""Who may join: the job's secret and certificates between machines, what a wrong one gives, and that neither shows anywhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from system.remote import attach, serving, tls

SECRET = "a-secret-of-this-job-0123456789"
OTHER = "a-secret-of-another-job-9876543210"
ACROSS = """
    data = bytes(range(256)) * 20000
    assert peers.slice(hosts=1, gpus=0).echo.call_one(data).get(10) == data
    assert [name for name, _ in peers.slice(hosts=0, gpus=0).ask.call_one(peers.slice(hosts=1)).get(10)] == ["host-b"] * 2
    print("across", flush=True)
"""


def shows(run_or_done, text):
    out = run_or_done.stdout if isinstance(run_or_done.stdout, str) else run_or_done.stdout()
    err = run_or_done.stderr if isinstance(run_or_done.stderr, str) else run_or_done.stderr()
    return text in out or text in err


def command_lines(pids):
    return " ".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in pids)


def failed_s(done):
    return float(re.search(r"^after ([0-9.]+) s", done.stdout, re.MULTILINE)[1])


@pytest.mark.parametrize("way", ["variable", "file"])
def test_who_holds_the_secret_joins(hosts, way):
    a, b, c = hosts[:3]
    env = {"MONARCH_SECRET": SECRET}
    if way == "file":
        path = "/dev/shm/secret"
        env = {"MONARCH_SECRET_FILE": path, "TEST_FILES": json.dumps({path: f"{SECRET}\n"})}
    env["MONARCH_FILE_LOG"] = "debug"
    with serving(a, 26600, env=env, ca=None) as first, serving(b, 26600, env=env, ca=None) as second:
        search = f"    print(peers.files_with.call({SECRET!r}).get(10).values())"
        done = attach(c, [a.url(26600), b.url(26600)], source=ACROSS + search, ca=None, **env)
        assert "from host-a host-b\n" in done.stdout and "across\n[[], [], [], []]" in done.stdout, done
        for loop in (first, second):
            assert SECRET not in command_lines(loop.pids())
            assert not shows(loop, SECRET) and "trusts all connections" not in loop.stderr()
    assert not shows(done, SECRET)


def test_who_holds_another_secret_or_none_does_not_join(hosts):
    a, b = hosts[:2]
    with serving(a, 26600, env={"MONARCH_SECRET": SECRET}, ca=None) as loop:
        wrong = attach(b, [a.url(26600)], ca=None, MONARCH_SECRET=OTHER)
        assert failed_s(wrong) < 3
        host = r"  next:  give all machines.*\n    \| tcp://10\.77\..*\n?.*the other end has another secret than this process"
        assert re.search(rf"RuntimeError: attach failed: .* 0 of 1 answered\n{host}", wrong.stdout), wrong
        assert "give all machines of the job one MONARCH_SECRET" in wrong.stdout
        none = attach(b, [a.url(26600)])
        assert failed_s(none) < 3 and "the other end requires the job's secret, and this process has none" in none.stdout
        careless = attach(b, [a.url(26600)], ca=None)
        assert "ValueError: a client at tcp://" in careless.stdout and "has no secret" in careless.stdout
        assert "connections refused: " in loop.stderr()
        assert "from host-a\n" in attach(b, [a.url(26600)], ca=None, MONARCH_SECRET=SECRET).stdout, "it serves on"
        for text in (SECRET, OTHER):
            assert not any(shows(run, text) for run in (loop, wrong, none, careless))
    with serving(a, 26601) as loop:
        done = attach(b, [a.url(26601)], MONARCH_SECRET=SECRET)
        assert failed_s(done) < 3 and "this process requires the job's secret, and the other end has none" in done.stdout
        assert "trusts all connections" in loop.stderr()


def test_certificates_of_the_job_encrypt_what_passes(hosts, tmp_path):
    a, b, c = hosts[:3]
    env = tls(tmp_path / "job")
    with serving(a, a.url(26600, "tls"), env=env, ca=None), serving(b, b.url(26600, "tls"), env=env, ca=None):
        urls = [a.url(26600, "tls"), b.url(26600, "tls")]
        done = attach(c, urls, source=ACROSS, ca=None, **env)
        assert "from host-a host-b\n" in done.stdout and "across" in done.stdout, done

        other = attach(c, urls, ca=None, **tls(tmp_path / "other"))
        assert failed_s(other) < 5 and "0 of 2 answered" in other.stdout and "certificate" in other.stdout, other
        none = attach(c, urls, ca=None)
        assert "ValueError: a client at tls://" in none.stdout and "needs a certificate" in none.stdout
        plain = attach(c, [a.url(26600)])
        assert failed_s(plain) < 3 and "this is a tls:// address; you dialled tcp://" in plain.stdout, plain
        assert "next:  dial tls:// there" in plain.stdout


def test_certificates_and_a_secret_are_both_asked_for(hosts, tmp_path):
    a, c = hosts["a"], hosts["c"]
    env = tls(tmp_path / "job")
    with serving(a, a.url(26600, "tls"), env={**env, "MONARCH_SECRET": SECRET}, ca=None):
        url = a.url(26600, "tls")
        assert "from host-a\n" in attach(c, [url], ca=None, MONARCH_SECRET=SECRET, **env).stdout
        assert "has another secret" in attach(c, [url], ca=None, MONARCH_SECRET=OTHER, **env).stdout
        assert "requires the job's secret" in attach(c, [url], ca=None, **env).stdout


def test_who_dials_tls_where_there_is_none_is_told(hosts, tmp_path):
    a, c = hosts["a"], hosts["c"]
    with serving(a, 26600):
        done = attach(c, [a.url(26600, "tls")], ca=None, **tls(tmp_path / "job"))
        assert failed_s(done) < 3 and "this is a tcp:// address; you dialled tls://" in done.stdout, done
