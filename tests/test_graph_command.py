"""`offbeat graph`: constants, exchanges, and mistakes in one line."""

import json
import re
import subprocess
import sys

import pytest

from offbeat import cli
from offbeat.gossip.graphs import constants, edge_rates, topology


def output_of(capsys, argv):
    assert cli.main(["graph", *argv.split()]) == 0
    return capsys.readouterr().out


def test_the_numbers_are_the_solvers(capsys):
    found = json.loads(output_of(capsys, "--topology star --workers 8 --rate 2 --json"))
    rates = edge_rates(topology("star", 8), 2.0)
    expected = constants(rates, 8)
    for name in ("lambda2", "chi1", "chi2", "eta", "alpha", "alpha_tilde"):
        assert found[name] == getattr(expected, name)
    assert {(i, j): rate for i, j, rate in found["edges"]} == rates
    assert found["exchanges"] == pytest.approx(sum(rates.values()))
    assert found["per_worker"] == pytest.approx([3.5, *[0.5] * 7])
    assert (found["topology"], found["workers"], found["rate"]) == ("star", 8, 2.0)


def test_the_text_names_every_constant(capsys):
    text = output_of(capsys, "--topology ring --workers 16")
    facts = dict(re.findall(r"^(\w+) +([\d.]+) ", text, re.MULTILINE))
    names = ["lambda_2", "chi1", "chi2", "eta", "alpha", "alpha_tilde", "exchanges"]
    assert list(facts) == names
    assert (facts["chi1"], facts["alpha_tilde"], facts["exchanges"]) == ("13.14", "1.872", "8")
    assert "8 " in text
    assert "1 of each worker" in text
    assert "0.5 to 3.5 of each worker" in output_of(capsys, "--topology star --workers 8 --rate 2")


def test_edges_and_seeds(capsys):
    found = json.loads(output_of(capsys, "--topology 0-1,1-2 --workers 3 --json"))
    assert [edge[:2] for edge in found["edges"]] == [[0, 1], [1, 2]]
    one, other = (
        json.loads(output_of(capsys, f"--topology random-regular --workers 12 --seed {k} --json"))
        for k in (0, 1)
    )
    assert one["edges"] != other["edges"]


def test_what_suits_the_links_of_a_cluster(capsys, tmp_path):
    """Two sites on a thin link: one edge between them is enough."""
    thin = [
        f'[[pairs]]\nhosts = [{i}, {j}]\nrates = {{net = "1mbit"}}' for i in (0, 1) for j in (2, 3)
    ]
    path = tmp_path / "sites.toml"
    path.write_text("\n".join(["hosts = 4", 'rate = "1gbit"', *thin]))
    found = json.loads(output_of(capsys, f"--topology measured --cluster {path} --json"))
    edges = {tuple(edge[:2]) for edge in found["edges"]}
    assert found["workers"] == 4
    assert {(0, 1), (2, 3)} < edges
    assert len(edges) < 6
    assert output_of(capsys, f"--topology measured --cluster {path}").startswith("measured: 4")


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        ("--workers 1", ["workers (1)"]),
        ("--topology measured", ["measured needs links", "--cluster"]),
        ("--cluster nowhere.toml", ["must come with --topology measured"]),
        ("--rate 0", ["rate (0)"]),
        ("--rate -1", ["rate (-1)"]),
        ("--rate nan", ["rate (nan)"]),
        ("--topology torus --workers 7", ["workers (7)", "6 or 8"]),
        ("--topology 0-1,2-3", ["(0, 1), (2, 3)"]),
        ("--topology 0-0,0-1 --workers 2", ["0-0", "self loops"]),
        ("--topology rings", ["'rings'"]),
    ],
)
def test_mistakes_are_one_line(argv, facts, capsys):
    assert cli.main(["graph", *argv.split()]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert [fact for fact in facts if fact not in printed.err] == []


def test_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None; from offbeat import cli; "
        "sys.exit(cli.main(['graph', '--workers', '4']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
