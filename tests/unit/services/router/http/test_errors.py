"""What a client learns of each error."""

import json

import pytest

from flashmesh import errors
from flashmesh.services.router.http.errors import HttpError, describe

LEAVES = {
    errors.InvalidRequest: 400,
    errors.PromptTooLong: 400,
    errors.UnknownModel: 404,
    errors.Unauthenticated: 401,
    errors.Overloaded: 429,
    errors.NoFreeBlocks: 429,
    errors.WorkerLost: 503,
    errors.Draining: 503,
    errors.StaleEpoch: 503,
    errors.BlockNotFound: 503,
    errors.CorruptBlock: 503,
    errors.DeadlineExceeded: 504,
    errors.Incompatible: 500,
    errors.FlashmeshError: 500,
    ZeroDivisionError: 500,
}


@pytest.mark.parametrize("kind", LEAVES)
def test_every_error_has_its_status_and_only_the_callers_own_has_its_text(kind):
    problem = describe(kind("decode-0 at 10.0.0.1"))
    assert problem.status == LEAVES[kind]
    told = problem.status in (400, 401, 404)
    for anthropic in (False, True):
        body = problem.body(anthropic=anthropic, request_id="req-1")
        assert (b"10.0.0.1" in body) == told
    assert ("retry-after" in problem.headers) == (problem.status in (429, 503))


def test_a_quota_says_when_to_come_again():
    problem = describe(errors.QuotaExceeded(2.3))
    assert (problem.status, problem.headers["retry-after"]) == (429, "3")
    assert "quota" in problem.message


def test_the_two_shapes():
    problem = describe(HttpError(413, "too long"))
    assert json.loads(problem.body(anthropic=False, request_id="r")) == {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": None,
            "code": None,
        }
    }
    assert json.loads(problem.body(anthropic=True, request_id="r")) == {
        "type": "error",
        "error": {"type": "request_too_large", "message": "too long"},
        "request_id": "r",
    }
