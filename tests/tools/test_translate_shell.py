"""Shell scripts as `translate` follows them: the forms of bash, and the lines that belong to no command."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from test_translate import read_and_translate

from jaxrl_llm.errors import UserError
from jaxrl_llm.tools.translate import arguments, documents, readers, shell
from jaxrl_llm.tools.translate.outcome import Unread, translate

# A script, and the words of the command that has a `k=`, without its name.
FORMS = [
    ('A=1\nB="${A}2"\nC=(x y)\nC+=("z 1")\nrun k=$B l=${NO:-"$A"} "${C[@]}" # m=1\n', ["k=12", "l=1", "x", "y", "z 1"]),
    ("run k=1 \\\n  `# a comment` \\\n  l=2 `# another \\` one` \\\n m=3", ["k=1", "l=2", "m=3"]),
    ("run k=1 \\\n  # l=2 \\\n  m=3", ["k=1"]),  # the comment ends the command
    ("run k=1 \\ \n  l=2", ["k=1", " "]),  # a blank behind the backslash does, too
    ("run k=1 \\\r\n  l=2\r\n", ["k=1", "l=2"]),
    ("run 'k=a b' l=\"c \\\"d\\\" \\$e\" m=$'x' n=a\\ b", ["k=a b", 'l=c "d" $e', "m=x", "n=a b"]),
    ('run k="one \\\n two"', ["k=one  two"]), ("run k=a#b", ["k=a#b"]),
    ('O="k=1 l=2"\nrun $O "$O"', ["k=1", "l=2", "k=1 l=2"]), ('O="k=1"\nO+=" l=2"\nrun $O', ["k=1", "l=2"]),
    ("O=(k=1)\nO+=(l=2)\nrun ${O[@]} first=${O[0]}", ["k=1", "l=2", "first=k=1"]),
    ("O=(\n k=1  # one\n\n # l=2\n m=3\n)\nrun \"${O[@]}\"", ["k=1", "m=3"]), ('O=()\nrun k=1 "${O[@]}"', ["k=1"]),
    ("run k=${A:=5} l=$A o=${B-d}", ["k=5", "l=5", "o=d"]),
    ("A=${X:-${Y:-deep}}\nrun k=$A", ["k=deep"]),
    ("run k=1 > log 2>&1 l=2 >> x &>y < z", ["k=1", "l=2"]),
    ("run k=1 2>&1 | tee log", ["k=1"]), ("set -x; exec run k=1", ["run", "k=1"]),
    ("nohup run k=1 > log 2>&1 &\nwait", ["run", "k=1"]), ("A=1 B=2 run k=$C", ["k=$C"]),
    ("env A=1 run k=1", ["A=1", "run", "k=1"]), ("cd x && run k=1 || exit 1", ["k=1"]),
    ("mkdir -p x || exit 1\nrun k=1", ["k=1"]), ("( cd x; run k=1 )", ["k=1"]), ("{ run k=1; } 2>&1", ["k=1"]),
    ("(exit 0)\nrun k=1", ["k=1"]),
    ("f() { run k=$1 l=\"$2\" \"$@\" n=$#; }\nf a 'b c' d", ["k=a", "l=b c", "a", "b c", "d", "n=3"]),
    ("function f {\n local x=$1\n run k=$x\n}\nf 3", ["k=3"]), ("main() {\n run k=1 \"$@\"\n}\nmain \"$@\"", ["k=1"]),
    ("if [ \"$A\" = \"\" ]; then B=1; else B=2; fi\nrun k=$B", ["k=1"]),
    ("A=x\nif [[ $A == x* ]]; then C=3; elif x; then C=4; fi\nrun k=$C", ["k=3"]),
    ("if [ -z \"$M\" ]; then M=default; fi\nrun k=$M", ["k=default"]),
    ("[ -n \"$M\" ] || M=default\n[[ -z ${N} ]] && N=other\nrun k=$M l=$N", ["k=default", "l=other"]),
    ("if [ $# -lt 2 ]; then\n echo usage\n exit 1\nfi\nrun k=1", ["k=1"]),
    ("M=a\nwhile [[ $# -gt 0 ]]; do case $1 in --m) M=$2; shift 2;; *) break;; esac; done\nrun k=$M", ["k=a"]),
    ("K=8\nwhile getopts k: o; do case $o in k) K=$OPTARG;; esac; done\nrun k=$K", ["k=8"]),
    ("case \"${E:-x}\" in\n  (x)\n    K=1 ;;\nesac\nrun k=$K", ["k=1"]),
    ("A=()\nfor f in a b; do A+=(k=$f); done\nrun \"${A[@]}\"", ["k=a", "k=b"]),
    ("for ((i=0; i<2; i++)); do echo $i; done\nrun k=1", ["k=1"]),
    ("CMD='run k=1'\n$CMD l=2", ["k=1", "l=2"]),
    ("cat <<EOF > x.yaml\na: don't \"\nEOF\nrun k=1", ["k=1"]),
    ("cat <<-'EOF'\n\ta.b=1 (\n\tEOF\nrun k=1 <<< text", ["k=1"]), ("diff <(a) <(b)\nrun k=1", ["k=1"]),
    ("time run k=1; run2 x", ["run", "k=1"]),
    ("export A=1 B='x y'\ndeclare -a C=(k=1 l=2)\nreadonly D=$A\nrun ${C[@]} m=$B n=$D", 
     ["k=1", "l=2", "m=x", "y", "n=1"]),
    ("A=$(pwd)\nB=\"$(cd \"$(dirname \"${BASH_SOURCE[0]}\")\" && pwd)\"\nrun k=$A/x l=$B/y", ["k=./x", "l=./y"]),
    ("run k='${a.b}' l=\\${c.d}", ["k=${a.b}", "l=${c.d}"]),
    ("set -- a b\nrun k=$1 l=$2", ["k=a", "l=b"]), ("run k=1\nexit 0\nrun k=2", ["k=1"]),
    # an option whose value is not known does not hide the options beside it
    ('O="k=1 l=$(date \'+%s %N\') m=$(a (b c))"\nrun $O n=3', ["k=1", "l=$(date '+%s %N')", "m=$(a (b c))", "n=3"]),
    ('H=($(hosts))\nO="k=${H[0]} l=${H:0} m=2"\nrun $O', ["k=$(hosts)", "l=${H:0}", "m=2"]),
    # the text of a heredoc in a variable
    ("A=1\nread -r -d '' O <<EOF\nk=$A \\\n  l=2\nm=3\nEOF\nrun $O", ["k=1", "l=2", "m=3"]),
    ("read -rd '' O <<'EOF' || true\nk=$A\nEOF\nrun $O", ["k=$A"]),
    ("O=$(cat <<-EOF\n\tk=1\n\tl=2\n\tEOF\n)\nrun $O m=3", ["k=1", "l=2", "m=3"]),
    ("O=$(cat << 'EOF'\nk=$A (\nEOF\n)\nrun \"$O\"", ["k=$A ("]),
    ("X=$(date)\nif [ -f y ]; then K=1; else K=1; fi\nrun k=$K", ["k=1"]),
    # an elif that never holds, behind a branch that may run
    ("if grep -q x y; then K=1; elif [ 1 = 2 ]; then K=9; else K=1; fi\nrun k=$K", ["k=1"]),
    ("trap 'kill 1' EXIT\n[ -d x ] && rm x\nrun k=1", ["k=1"]),
]  # fmt: skip


def test_each_form_of_bash_has_the_words_that_bash_makes_of_it():
    wrong = []
    for script, words in FORMS:
        commands = [one.words for one in shell.follow(script).commands if any(w.startswith("k=") for w in one.words)]
        if [command[1:] for command in commands] != [words]:
            wrong.append((script, commands, words))
    assert wrong == []


AS_BASH = [  # further forms, which bash itself follows beside us
    'A=x\nA=${A}y run k=$A', 'f() { local A=2; run k=$A; }\nA=1\nf\nrun k=$A', 'f() { A=2; }\nA=1\nf\nrun k=$A',
    'A=a\nrun k=$A$A l="$A"\'$A\'$A', "run k='a'\\''b'", 'run k="a\nb"', 'run k=1 \\\n\\\n l=2', 'false || run k=1',
    'false && run k=1\nrun k=2', '! false && run k=1', 'if ! [ a = b ]; then run k=1; fi',
    'if [ a = b ] || [ c = c ]; then run k=1; fi', 'if [[ abc =~ ^a.*c$ ]]; then run k=1; fi',
    'if [[ "a b" == "a b" ]]; then run k=1; else run k=2; fi', 'case x in a*|x) run k=1;; *) run k=2;; esac',
    'for x in a "b c" d; do run k="$x"; done', 'A="a b"\nfor x in $A; do run k=$x; done',
    'for x; do run k=$x; done\nrun k=0', 'f() { for x in "$@"; do run k=$x; done; }\nf 1 2',
    'f() { shift; run k=$1 "$@"; }\nf a b c',
    'f() { if [ $# -gt 1 ]; then run k=many; else run k=one; fi; }\nf a\nf a b',
    'f() { return 0; run k=1; }\nf\nrun k=2', 'for x in 1 2 3; do if [ $x = 2 ]; then break; fi; run k=$x; done',
    'for x in 1 2 3; do [ $x = 2 ] && continue; run k=$x; done', 'A=$((1+2))\nB=$A$((A+1))\nrun k=$B', 'run k=~/x',
    'A=~/x\nrun k=$A', 'run k="~/x"', 'A="x"\nrun k="${A}_$A-$A.$A/$A"',
    'A=""\nrun k=${A:-d} l=${A-d}.', 'run k=1&wait',
    '{ run k=1;run k=2;}', 'cat <<"A" <<B\nx\nA\ny\nB\nrun k=1', 'run k=1 <<EOF\nb=2\nEOF\nrun k=3',
    'run k=[1,2] l={x:1} m="[a, b]"', "run k=['a','b']",
    'run "k=[\'a\',\'b\']"', 'run k=a=b l==c', 'A=x\nrun k=\\$A l="\\$A" m=\'$A\'', 'A+=1\nA+=2\nrun k=$A',
    'readonly A=1 B=2\nrun k=$A$B', "run k=1 # it's\nrun k=2", 'f(){ run k=1; }; f',
    'A=1 ; if [ "$A" -ge 1 -a "$A" -lt 2 ]; then run k=1; fi', 'run k=${A:=x}$A',
    'A=(k=1 "l=2 3")\nB=("${A[@]}" m=4)\nrun "${B[@]}"', 'A=k\nrun $A=1', 'IFS=,\nrun k=1', 'x=1; export x; run k=$x',
    'if [[ -z "${A:-}" ]]; then A=1; fi; run k=$A', '[[ "${A:-false}" == "true" ]] && B=1 || B=2\nrun k=$B',
    'A=true\nif $A; then run k=1; else run k=2; fi',
    'run k="" l=\'\' m=', 'run k=1 ""',
    'A=5\nrun k=$((-A)) l=$((A*2+1)) m=$((2 ** 3)) o=$((7/2)) p=$((7%3)) q=$((-7/2)) r=$((-7%3))',
    'f() { local A; A=2; run k=$A; }\nA=1\nf\nrun k=$A',
    'f() { for x in 1 2; do return; done; run k=0; }\nf; run k=$x',
    'x=1\n( x=2; run k=$x )\nrun k=$x',
    'for a in 1 2; do run k=$a; break; for b in 3 4; do run k=$b; done; run k=5; done\nrun k=$a',
    'for a in 1 2; do if [ $a = 1 ]; then continue; fi; for b in 3 4; do run k=$a$b; done; done',
    'f() { for a in 1 2; do return; done; run k=0; }\nf; for b in 3; do run k=$b; done',
    'case 2 in 1) A=3;; 2) A=4; run k=$A;; *) run k=5;; esac; run k=$A', 'A=1 | true\nA=2 &\nrun k=${A:-3}',
]  # fmt: skip
# Forms of bash that are not followed: the number of samples, or the line, is the user's to look at.
TOLD = [
    "IFS=,\nA=8,9\nfor n in $A; do run k=$n; done",
    "A=a.8\nrun k=${A#a.}", "A=8.c\nrun k=${A%.*}", "A=a8\nrun k=${A:1}", "A=a8\nrun k=${A/a/}",
    "A=B\nB=8\nrun k=${!A}", "A=a\nrun k=${A^^}", "A=abc\nrun k=${#A}", "A=(1 2)\nrun k=${#A[@]}",
    "A=(1 2)\nrun ${A[@]:1} k=1", "run k={8,9}", "for n in {1..3}; do run k=$n; done", "A=1\nrun k=${A:+8}",
    "A=(1 2)\nrun k=${A[*]}", "A=(1 2)\nA[0]=8\nrun k=${A[0]}", "declare -A M=([x]=8)\nrun k=${M[x]}",
    "let A=3+5\nrun k=$A", "N=7\n((N++))\nrun k=$N", "N=7\nread N\nrun k=$N",
    "N=2\nif (( N > 1 )); then K=8; else K=9; fi\nrun k=$K",
    "if [[ a == a && b == c ]]; then K=8; else K=9; fi\nrun k=$K",
    "K=8\nwhile [ $K -lt 12 ]; do run k=$K; K=$((K+2)); done", "until [ $K = 8 ]; do K=8; done\nrun k=$K",
    "for ((i=1; i<3; i++)); do run k=$i; done", "i=5\nfor ((i=1; i<3; i++)); do x; done\nrun k=$i",
    "A=(8)\nif grep -q x y; then A=(9); fi\nrun k=${A[0]}", "set -- 8 9\nif grep -q x y; then shift; fi\nrun k=$1",
    "K=8\nwhile read line; do K=9; done < x\nrun k=$K", "K=8\nprintf -v K 9\nrun k=$K", "A=$(echo 8)\nrun k=$A",
    "CMD='run k=8'\neval \"$CMD\"", "eval run k=8", "bash -c 'run k=8'", "select n in 8 9; do run k=$n; done",
    "K=8\n[ -f x ] && K=9\nrun k=$K", "K=8\ngrep -q x y && K=9 || K=7\nrun k=$K",
    "K=8\nunset K\nrun k=${K:-9}", "for x in 8 9; do K=$x; if grep -q x y; then break; fi; done\nrun k=$K",
    "f() { if grep -q x y; then K=9; return; fi; K=8; }\nf\nrun k=$K",
    "f() { for x in 1; do grep -q x y && return; done; K=8; }\nK=9\nf\nrun k=$K",
    "A=()\nfor x in 8 9; do grep -q x y && continue; A+=(k=$x); done\nrun ${A[@]}",
    "run k=$((9**9**9))", "run k=$((2**70))", "mapfile -t K < x\nrun k=${K[0]}",
]  # fmt: skip
RUN = """run() { printf 'RUN' ; for word in "$@"; do printf '\\037%s' "$word"; done; printf '\\036'; } >&9
exec 9>&1
"""


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
def test_bash_itself_makes_the_same_words(tmp_path):
    wrong = []
    for script in AS_BASH:
        done = subprocess.run(["bash", "-c", RUN + script], capture_output=True, cwd=tmp_path, env=dict(HOME="~"))
        runs = done.stdout.decode().split("\036")
        bash = [one.partition("RUN\037")[2].split("\037") for one in runs if "RUN\037" in one]
        ours = [command.words[1:] for command in shell.follow(script).commands if command.words[0] == "run"]
        wrong += [] if bash == ours else [(script, bash, ours)]
    assert wrong == []


UNREAD = [
    "$UNSET", "${UNSET}", "$1", "$(date +%s)", "`date`", "$((UNSET + 1))", "$DOUBT", "${UNSET?no}", "${UNSET%x}",
]  # fmt: skip


def test_a_value_that_the_script_does_not_say_is_unread():
    for value in UNREAD:
        script = f"if grep -q x y; then DOUBT=1; fi\nrun 'k={{a}}' l={value} m=1"
        run = next(one for one in shell.follow(script).commands if one.words[0] == "run")
        keys, left = arguments.keys_of(run.words[1:])
        read = {key: documents.value_of(text, str) for key, text in keys.items()}
        assert left == [] and read["k"] == "{a}" and read["m"] == "1" and isinstance(read["l"], Unread), value


def test_the_arguments_of_a_command_are_keys_and_the_rest_is_named():
    words = re.findall(r"\S+", "a.b=1 +c=2 --d=3 -cn x --config-path y --e z q@r=1")
    keys, left = arguments.keys_of(words)
    assert keys == {"a.b": "1", "c": "2", "--d": "3", "--config-name": "x", "--config-path": "y", "--e": "True"}
    assert left == ["z", "q@r=1"]
    flags, left = arguments.flags(re.findall(r"\S+", "x --a-b 1 --c --d=x --e 1 2"))
    assert flags == {"a_b": "1", "c": "True", "d": "x", "e": ["1", "2"]} and left == ["x"]


VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=a/b"
# A script, its keys besides the model, and the lines that belong to no command.
LOST = {
    "a comment in the middle": (
        f"{VERL} \\\n  data.train_batch_size=8 \\\n  # data.seed=1 \\\n"
        "  actor_rollout_ref.rollout.n=8 \\\n  trainer.nnodes=2",
        {"data.train_batch_size": 8},
        ["line 4: actor_rollout_ref.rollout.n=8", "line 5: trainer.nnodes=2"],
    ),
    "a blank behind a backslash": (
        f"{VERL} \\ \n  trainer.nnodes=2",
        {},
        ["line 2: trainer.nnodes=2"],
    ),
    "an array that is not used, and a part of it in a variable": (
        f'A=(data.seed=1)\nB="trainer.nnodes=2 trainer.save_freq=3"\nC=(data.seed=4)\n{VERL} "${{C[@]}}"',
        {"data.seed": 4},
        ["line 2: trainer.nnodes=2 trainer.save_freq=3"],  # the key of line 1 has its value from line 3
    ),
    "a branch that is not taken, and one that may be": (
        f'A=()\nif [ 1 = 2 ]; then A+=(data.seed=1); fi\nif grep -q x y; then A+=(data.seed=2); fi\n'
        f'case 3 in 4) A+=(data.seed=3);; esac\n{VERL} "${{A[@]}}"',
        {},
        ["${A: a branch decides}: not a key with a value that the script says", "line 2: data.seed=1",
         "line 3: data.seed=2", "line 4: data.seed=3"],
    ),
    "words that are no keys": (
        f"{VERL} more $(cat args.txt) \"$@\" trainer@x=1",
        {},
        [f"{word}: not a key with a value that the script says" for word in ("more", "$(cat args.txt)", "trainer@x=1")],
    ),
    "a heredoc": (
        f"cat <<EOF\ndata.seed=3\nEOF\n{VERL}",
        {},
        ["line 2: data.seed=3"],
    ),
    "another training command in a text": (
        f"{VERL} data.seed=1\nCMD='{VERL} data.seed=2'\neval $CMD",
        {"data.seed": 1},
        [f"eval {VERL} data.seed=2"],
    ),
    "another command has its own": (f"pip install data.x==1\npython prep.py data.seed=3\n{VERL}", {}, []),
    "what is behind exit": (f"{VERL}\nexit\npython x.py \\\n data.seed=1", {}, ["line 4: data.seed=1"]),
    "a function, srun and a default": (
        f"SEED=${{SEED:-7}}\nrun() {{\n  srun -N1 {VERL} \\\n    data.seed=$SEED \"$@\"\n}}\nrun trainer.nnodes=2",
        {"data.seed": 7, "trainer.nnodes": 2},
        [],
    ),
}  # fmt: skip


def test_a_line_that_looks_like_a_key_is_a_key_or_is_named(tmp_path):
    path = tmp_path / "run.sh"
    for name, (script, keys, lost) in LOST.items():
        path.write_text(script)
        source = readers.read(path)
        assert (source.keys, list(source.lost)) == ({"actor_rollout_ref.model.path": "a/b"} | keys, lost), name


def test_a_form_of_bash_that_is_not_followed_is_told(tmp_path):
    path = tmp_path / "run.sh"
    for form in TOLD:
        path.write_text(form.replace("run ", f"{VERL} ").replace("k=", "actor_rollout_ref.rollout.n="))
        # A form that takes the whole command with it is refused in one line.
        with contextlib.suppress(UserError):
            source = readers.read(path)
            assert source.lost or "group_size" in translate(source.table, source.keys).unknown(), form


def test_a_quoted_mark_of_a_heredoc_keeps_its_text():
    files = shell.follow('A=1\ncat > a << EOF\n"$A"\nEOF\ncat > b << \'EOF\'\n"$A"\nEOF\n').files
    assert files == {"a": '"1"\n', "b": '"$A"\n'}


def test_a_file_of_a_variable_has_its_text_and_grows_behind_two_marks(tmp_path):
    script = "read -r -d '' A <<'EOF'\nmodel_name_or_path: a/b\nbeta: 0.2\nEOF\necho \"$A\" > x.yaml\n"
    script += "printf '%s\\n' 'max_steps: 7' >> x.yaml\ncat >> x.yaml <<EOF\nseed: 3\nEOF\n"
    (path := tmp_path / "run.sh").write_text(f"{script}trl grpo --config x.yaml --reward_funcs accuracy_reward\n")
    source = readers.read(path)
    expected = {"model_name_or_path": "a/b", "beta": 0.2, "max_steps": 7, "seed": 3}
    assert expected.items() <= source.keys.items() and source.lost == ()


CODE = """from trl import GRPOConfig, GRPOTrainer
GRPOTrainer('a/b', accuracy_reward, GRPOConfig(max_steps=9, beta=$B), 'c/d').train()
"""


def test_python_code_inside_a_script_is_read(tmp_path):
    for script in (f"B=0.1\npython3 - <<EOF\n{CODE}EOF\n", f'B=0.1\npython -c "{CODE}"\n',
                   f"read -r -d '' CODE <<'EOF'\n{CODE.replace('$B', '0.1')}EOF\npython -c \"$CODE\"\n"):  # fmt: skip
        source, made = read_and_translate(tmp_path, "run.sh", script)
        assert (made.fields()["kl.coef"], made.fields()["num_steps"], source.lost) == (0.1, 9, ()), script


def test_a_file_that_a_script_sources_is_in_a_note(tmp_path):
    (path := tmp_path / "run.sh").write_text(f"source env.sh\n{VERL} data.seed=1")
    source = readers.read(path)
    assert source.keys["data.seed"] == 1 and ["env.sh" in note for note in source.notes] == [True]


def test_members_of_a_pipe_leave_no_variables_behind():
    (run,) = [one for one in shell.follow("A=1\nA=2 | A=3\nA=4 &\nrun k=$A").commands if one.words[0] == "run"]
    assert run.words == ["run", "k=1"]


def test_a_key_that_is_set_twice_has_the_last_value_and_one_of_a_loop_is_unread(tmp_path, wording):
    path = tmp_path / "run.sh"
    path.write_text(f"A=(data.seed=1 trainer.nnodes=2)\n{VERL} ${{A[@]}} data.seed=3 trainer.nnodes=2")
    source = readers.read(path)
    assert source.keys["data.seed"] == 3 and source.lost == ()
    path.write_text(f"for seed in 1 2; do\n  {VERL} data.seed=$seed trainer.nnodes=3\ndone")
    source = readers.read(path)
    assert source.keys["trainer.nnodes"] == 3 and isinstance(source.keys["data.seed"], Unread)
    wording(source.keys["data.seed"])


BROKEN = [  # a script, and what the line names that refuses it
    ('echo "a', "run.sh"), ("A=(1 2", "run.sh"), ("echo $(a", "run.sh"), ("if x; then y", "'fi'"),
    ("for a in b; do c", "'done'"), ("f() { x", "'}'"), ("case a in b) c", "'esac'"),
    (f"if false; then\n{VERL}\nfi", "line 2: "),
    ("python -m verl.trainer.main_ppo algorithm.gamma=1 \\\n# a comment \\\nactor_rollout_ref.rollout.n=8",
     "line 3: actor_rollout_ref.rollout.n=8"),
]  # fmt: skip


def test_a_script_that_is_broken_gives_one_line(tmp_path, refused):
    path = tmp_path / "run.sh"
    for script, named in BROKEN:
        path.write_text(script)
        with refused(named):
            readers.read(path)


ENDLESS = [
    ("run.sh", "(" * 3000), ("run.sh", "A=" + "${A:-" * 3000), ("run.sh", "if " * 3000),
    ("run.sh", "f() { f; f; f; f; }\nf"),
    ("run.sh", "A=x\nfor i in 1 2 3 4 5 6 7 8 9 a b c d e f g h i j k; do A=$A$A; done"),
    ("run.sh", "A=(x y)\nfor i in 1 2 3 4 5 6 7 8 9 a b c d e f g h i j k; do A+=(${A[@]}); done"),
    ("run.sh", "while true; do while true; do while true; do while true; do x; done; done; done; done"),
    ("run.sh", "run " + "{a,b}" * 40),
    ("v.yaml", "a: &a [*a]\nbeta: 1\n"), ("v.yaml", "defaults: [v]\ntrainer: {nnodes: 1}\n"),
]  # fmt: skip


def test_a_file_without_an_end_gives_one_line_soon(tmp_path):
    for name, text in ENDLESS:
        (tmp_path / name).write_text(text)
        begin = time.process_time()
        with pytest.raises(UserError) as error:
            readers.read(tmp_path / name)
        assert "\n" not in str(error.value) and time.process_time() - begin < 3, text[:50]


def test_no_text_makes_the_reader_hang_or_raise_anything_else():
    text = Path(__file__).read_text()[:9000]
    for start in range(0, len(text), 150):
        for piece in (text[start : start + 90], "\n".join(script for script, _ in FORMS[: start % 40])[: 3 * start]):
            with contextlib.suppress(UserError):
                shell.follow(piece)
