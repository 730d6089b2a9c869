"""The target answers prompts: kept ids, mixes, several processes, kills, chats turn by turn, and an OpenAI-compatible
server."""

from __future__ import annotations

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from spechead import mixin
from spechead.training import generate
from spechead.training.answer_log import AnswerLog, Question, repair_parts
from spechead.training.backends import EndpointBackend, LocalBackend
from spechead.training.chat import ChatEncoder
from spechead.training.generate import generate_data, row_ids
from spechead.training.generations import batches
from spechead.training.rows import load_sources


@pytest.fixture
def settings(tiny, chats, tmp_path):
    return {
        "target": str(tiny),
        "data": [str(chats)],
        "dtype": "float32",
        "output_dir": str(tmp_path / "answers"),
        "max_new_tokens": "12",
        "rows_per_batch": "4",
        "use_cpu": "true",
        "temperatures": ["0.0", "0.8"],
    }


def records(where):
    return [json.loads(line) for part in sorted(where.glob("part-*.jsonl")) for line in part.read_text().splitlines()]


def test_every_turn_is_answered_on_the_targets_own_history(settings, flags, tiny, tmp_path):
    lines = generate_data(flags(settings))
    made = records(tmp_path / "answers")
    assert {(record["id"], record["turn"]) for record in made} == {
        (str(number), turn) for number in range(30) for turn in range(1 + number % 2)
    }
    assert len(made) == 45
    assert {record["temperature"] for record in made} == {0.0, 0.8}
    assert "answer tokens written" in lines[0]
    tokenizer, target = AutoTokenizer.from_pretrained(tiny), AutoModelForCausalLM.from_pretrained(tiny)
    by_turn = {(record["id"], record["turn"]): record for record in made}
    second = by_turn["1", 1]
    own = tokenizer.decode(by_turn["1", 0]["response_ids"], skip_special_tokens=True)
    assert own in tokenizer.decode(second["prompt_ids"])
    greedy = next(record for record in made if record["temperature"] == 0.0)
    ids = torch.tensor([greedy["prompt_ids"] + greedy["response_ids"]])
    with torch.no_grad():
        best = target(input_ids=ids).logits[0].argmax(-1)
    start = len(greedy["prompt_ids"])
    assert best[start - 1 : -1].tolist() == greedy["response_ids"]
    for record in made:
        ended = record["response_ids"][-1] == tokenizer.eos_token_id
        assert ended == (record["finish"] == "stop")
        assert tokenizer.eos_token_id not in record["response_ids"][:-1]


def test_speculation_gives_the_greedy_answers_of_plain_generation(settings, flags, tiny, tmp_path, monkeypatch):
    generate_data(flags(settings | {"output_dir": str(tmp_path / "plain")}))
    drafted_tokens, decode = [], mixin.speculative_decode

    def watched(context):
        decode(context)
        drafted_tokens.append(context.stats.drafted_tokens)

    monkeypatch.setattr(mixin, "speculative_decode", watched)
    faster = settings | {"speculative": "prompt_lookup", "rows_per_batch": "2"}
    generate_data(flags(faster | {"output_dir": str(tmp_path / "faster")}))
    plain, drafted = (
        {(record["id"], record["turn"]): record for record in records(tmp_path / name) if record["temperature"] == 0}
        for name in ("plain", "faster")
    )
    assert sum(drafted_tokens) > 0
    assert json.loads((tmp_path / "faster" / "provenance.json").read_text())["speculative"] == "prompt_lookup"
    first = [key for key in plain if key[1] == 0]
    assert len(first) > 5
    assert [drafted[key]["response_ids"] for key in first] == [plain[key]["response_ids"] for key in first]
    remote = faster | {"endpoint": "http://localhost:1/v1", "output_dir": str(tmp_path / "remote")}
    with pytest.raises(ValueError, match=r"speculative='prompt_lookup' is for the local target"):
        generate_data(flags(remote))
    with pytest.raises(ValueError, match="needs a head"):
        generate_data(flags(settings | {"speculative": "medusa", "output_dir": str(tmp_path / "none")}))


def test_a_killed_run_goes_on_without_losing_or_repeating_an_answer(settings, flags, tmp_path, monkeypatch):
    plain, calls = LocalBackend.answer, []

    def dying(self, questions):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return plain(self, questions)

    monkeypatch.setattr(LocalBackend, "answer", dying)
    with pytest.raises(KeyboardInterrupt):
        generate_data(flags(settings))
    part = tmp_path / "answers" / "part-00000.jsonl"
    kept = records(tmp_path / "answers")
    assert len(kept) == 12
    part.write_bytes(part.read_bytes() + b'{"id": "29", "turn": 0, "respo')  # killed while writing
    monkeypatch.setattr(LocalBackend, "answer", plain)
    generate_data(flags(settings))
    made = records(tmp_path / "answers")
    assert made[:12] == kept
    keys = [(record["id"], record["turn"]) for record in made]
    assert len(keys) == len(set(keys)) == 45


def test_sources_that_count_alike_keep_all_their_answers(settings, flags, tmp_path):
    sources = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"id": n, "prompt": f"{name} {n}"}) + "\n" for n in range(3)))
        sources.append(str(path))
    generate_data(flags(settings | {"data": sources}))
    made = records(tmp_path / "answers")
    assert sorted(record["id"] for record in made) == ["0", "1", "2", "b.jsonl:0", "b.jsonl:1", "b.jsonl:2"]
    generate_data(flags(settings | {"data": sources}))
    assert len(records(tmp_path / "answers")) == 6


def test_two_rows_of_one_name_are_refused():
    with pytest.raises(ValueError, match="Two rows are called s:3"):
        row_ids([{"id": 3, "source": "s"}] * 3)


def test_answers_of_other_processes_are_found_whatever_their_number(settings, flags, tmp_path, monkeypatch):
    class Second:
        is_main_process, is_local_main_process, process_index, num_processes, device = (
            False,
            False,
            1,
            2,
            torch.device("cpu"),
        )

        def __init__(self, cpu, timeout):
            pass

        def wait_for_everyone(self):
            pass

    monkeypatch.setattr(generate, "PartialState", Second)
    generate_data(flags(settings))
    half = records(tmp_path / "answers")
    assert {int(record["id"]) % 2 for record in half} == {1}
    monkeypatch.undo()
    with (tmp_path / "answers" / "part-00001.jsonl").open("a") as part:
        part.write('{"id": "2", "turn": 0, "respo')  # killed while writing, and never started again
    generate_data(flags(settings))
    made = records(tmp_path / "answers")
    assert len({(record["id"], record["turn"]) for record in made}) == len(made) == 45
    assert [record for record in made if record in half] == half
    assert len(load_sources([str(tmp_path / "answers")])) == 45


def test_other_settings_in_the_same_directory_are_refused(settings, flags):
    generate_data(flags(settings | {"limit": "2"}))
    with pytest.raises(ValueError, match="seed"):
        generate_data(flags(settings | {"limit": "2", "seed": "5"}))


def test_edited_prompts_are_refused_and_appended_ones_asked(settings, flags, tmp_path):
    path = tmp_path / "prompts.jsonl"
    told = flags(settings | {"data": [str(path)], "temperatures": ["0.0"]})
    texts = ["red sun", "old moon", "blue tree"]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    generate_data(told)
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in [*texts, "new bird"]))
    generate_data(told)
    made = records(tmp_path / "answers")
    assert sorted(record["id"] for record in made) == ["0", "1", "2", "3"]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ["first", *texts, "new bird"]))
    with pytest.raises(ValueError, match=r"row 0, turn 0, that was given to another prompt"):
        generate_data(told)
    assert records(tmp_path / "answers") == made


def test_a_later_turn_does_not_follow_an_answer_to_another_prompt(settings, flags, tmp_path):
    path = tmp_path / "chats.jsonl"
    told = flags(settings | {"data": [str(path)]})

    def write(*texts):
        turns = [turn for text in texts for turn in ({"role": "user", "content": text},)]
        path.write_text(json.dumps({"id": "a", "messages": turns}) + "\n")

    write("red sun")
    generate_data(told)
    write("old moon", "blue tree")
    with pytest.raises(ValueError, match=r"row a, turn 0"):
        generate_data(told)
    assert len(records(tmp_path / "answers")) == 1
    write("red sun", "blue tree")
    generate_data(told)
    assert [record["turn"] for record in records(tmp_path / "answers")] == [0, 1]


def test_prompts_stay_within_learned_positions(settings, flags, learned, tmp_path):
    lines = generate_data(flags(settings | {"target": str(learned), "max_new_tokens": "70"}))
    made = records(tmp_path / "answers")
    assert made
    assert all(len(record["prompt_ids"]) + 70 <= 96 for record in made)
    assert any("a history of more than 26 tokens" in line for line in lines)
    with pytest.raises(ValueError, match=r"max_new_tokens=96 leaves no prompt within the target's 96 positions"):
        generate_data(flags(settings | {"target": str(learned), "max_new_tokens": "96", "output_dir": "other"}))


def test_provenance_says_how_the_answers_were_made(settings, flags, tmp_path):
    generate_data(flags(settings | {"limit": "2"}))
    said = json.loads((tmp_path / "answers" / "provenance.json").read_text())
    assert {
        "target",
        "target_fingerprint",
        "template",
        "template_kwargs",
        "seed",
        "temperatures",
        "versions",
    } <= said.keys()
    assert said["target_fingerprint"]["config"]
    assert (said["top_p"], said["top_k"], said["min_p"], said["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)
    assert said["target_commit"] is None


def test_provenance_names_the_commit_of_a_target_on_the_hub(settings, flags, tiny, tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--someone--tiny"
    shutil.copytree(tiny, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    generate_data(flags(settings | {"target": "someone/tiny", "limit": "2"}))
    path = tmp_path / "answers" / "provenance.json"
    said = json.loads(path.read_text())
    assert (said["target"], said["target_revision"], said["target_commit"]) == ("someone/tiny", None, commit)
    path.write_text(json.dumps({name: value for name, value in said.items() if name != "target_commit"}))
    generate_data(flags(settings | {"target": "someone/tiny", "limit": "2"}))  # as an earlier version left it


def test_answers_of_a_law_that_was_not_recorded_are_not_mixed(settings, flags, tmp_path):
    generate_data(flags(settings | {"limit": "2"}))
    path = tmp_path / "answers" / "provenance.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in said.items() if name != "repetition_penalty"}))
    with pytest.raises(ValueError, match=r"did not record repetition_penalty.*\"repetition_penalty\": 1.0 to "):
        generate_data(flags(settings | {"limit": "2"}))


def test_the_targets_own_generation_config_changes_no_answer(settings, flags, tiny, tmp_path):
    generate_data(flags(settings | {"limit": "8"}))
    shutil.copytree(tiny, tmp_path / "own")
    own = GenerationConfig.from_pretrained(tiny)
    own.update(repetition_penalty=5.0, no_repeat_ngram_size=1, min_new_tokens=12, top_k=2, do_sample=True)
    own.save_pretrained(tmp_path / "own")
    other = {"target": str(tmp_path / "own"), "output_dir": str(tmp_path / "others"), "limit": "8"}
    generate_data(flags(settings | other))
    assert records(tmp_path / "others") == records(tmp_path / "answers")


def test_batches_are_of_one_temperature_within_the_budget():
    asked = [Question(str(n), 0, "", 0.8 * (n % 2), [1] * (5 + n)) for n in range(20)]
    made = batches(asked, rows_per_batch=6, tokens_per_batch=150, new_tokens=10)
    assert sorted(int(question.row_id) for batch in made for question in batch) == list(range(20))
    for batch in made:
        assert len({question.temperature for question in batch}) == 1
        assert len(batch) * (max(len(question.prompt_ids) for question in batch) + 10) <= 150
        assert len(batch) <= 6


@pytest.fixture
def server(tiny):
    """A stand-in for vLLM's /v1/completions; `behaviour` says what it sends."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    state = {"behaviour": "ids", "status": 404, "fail": 0, "under_way": 0, "most": 0, "bodies": []}
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                state["bodies"].append(body)
                state["under_way"] += 1
                state["most"] = max(state["most"], state["under_way"])
                failing, state["fail"] = state["fail"] > 0, state["fail"] - 1
            threading.Event().wait(0.02)  # long enough for requests to overlap
            text = "sun moon"
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            choice = {"text": text, "finish_reason": "stop"}
            count = len(ids)
            if state["behaviour"] == "ids":
                choice["token_ids"] = ids
            if state["behaviour"] == "other tokens":
                count += 3
            reply = json.dumps({"choices": [choice], "usage": {"completion_tokens": count}}).encode()
            with lock:
                state["under_way"] -= 1
            if state["behaviour"] == "cut short" and failing:
                self.send_response(200)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply[:9])
                return
            status = state["status"] if state["behaviour"] == "refuse" else 503 if failing else 200
            self.send_response(status)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *args):
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    state["url"] = f"http://127.0.0.1:{made.server_port}/v1"
    yield state
    made.shutdown()


@pytest.mark.parametrize(("behaviour", "retokenized"), [("ids", False), ("text", True)])
def test_a_server_answers_with_ids_or_text(settings, flags, server, tmp_path, tiny, behaviour, retokenized):
    server["behaviour"] = behaviour
    server["fail"] = 2
    options = {"endpoint": server["url"], "concurrency": "3"}
    generate_data(flags(settings | options))
    made = records(tmp_path / "answers")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    expected = [*tokenizer("sun moon", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert len(made) == 45
    assert all(record["response_ids"] == expected and record["retokenized"] == retokenized for record in made)
    assert 1 < server["most"] <= 3
    body = server["bodies"][0]
    assert isinstance(body["prompt"][0], int)
    assert body["return_token_ids"] is True
    # Left out, a server takes them from the model's generation config; -1 is all tokens to vLLM and to SGLang.
    assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1.0, -1, 0.0, 1.0)


def test_text_whose_tokens_are_not_the_generated_ones_is_dropped_and_counted(settings, flags, server, tmp_path):
    server["behaviour"] = "other tokens"
    lines = generate_data(flags(settings | {"endpoint": server["url"], "limit": "4"}))
    made = records(tmp_path / "answers")
    assert [record["response_ids"] for record in made] == [None] * 4
    assert any("4 answers or requests: dropped" in line for line in lines)
    before = len(server["bodies"])
    generate_data(flags(settings | {"endpoint": server["url"], "limit": "4"}))
    assert len(server["bodies"]) == before  # dropped ones are not asked again


def test_a_refusing_server_and_a_failing_one_end_with_what_they_said(tiny, server, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    backend = EndpointBackend(server["url"], "m", ChatEncoder(AutoTokenizer.from_pretrained(tiny)), 4, 0, retries=2)
    question = Question("0", 0, "", 0.0, [1, 2])
    server["fail"] = 99
    with pytest.raises(RuntimeError, match=r"failed 3 times.*kept"):
        backend.answer([question])
    server["fail"], server["behaviour"] = 0, "refuse"
    with pytest.raises(RuntimeError, match=r"status 404[^.]*$"):
        backend.answer([question])
    server["status"] = 400
    with pytest.raises(RuntimeError, match=r"status 400.*does not know top_k, min_p, .* vLLM or SGLang"):
        backend.answer([question])


@pytest.mark.parametrize("behaviour", ["ids", "text"])
def test_an_answer_ends_as_the_template_ends_it(tiny, server, behaviour):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "<|eot_id|>")
    first, closing = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|eot_id|>"])
    assert first == tokenizer.eos_token_id < closing  # as Llama 3.1 has <|end_of_text|> and <|eot_id|>
    server["behaviour"] = behaviour
    encoder = ChatEncoder(tokenizer, end_ids=[first, closing])
    (answer,) = EndpointBackend(server["url"], "m", encoder, 4, 0).answer([Question("0", 0, "", 0.0, [1, 2])])
    assert answer.response_ids[-1] == closing
    assert answer.response_ids[:-1] == tokenizer("sun moon", add_special_tokens=False)["input_ids"]


def test_a_reply_that_was_cut_short_is_asked_for_again(tiny, server, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    backend = EndpointBackend(server["url"], "m", ChatEncoder(AutoTokenizer.from_pretrained(tiny)), 4, 0, retries=2)
    server["behaviour"], server["fail"] = "cut short", 2
    (answer,) = backend.answer([Question("0", 0, "", 0.0, [1, 2])])
    assert answer is not None
    assert len(server["bodies"]) == 3


def test_half_lines_are_dropped_and_whole_ones_kept(tmp_path):
    (tmp_path / "part-00000.jsonl").write_text(
        '{"id": "1", "turn": 0, "prompt_ids": [2], "response_ids": [1]}\n{"id": "2", "tu'
    )
    repair_parts(tmp_path)
    log = AnswerLog(tmp_path)
    assert "1#0" in log
    assert log.response_ids("1#0") == [1]
    assert (tmp_path / "part-00000.jsonl").read_text().endswith("]}\n")
