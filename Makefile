# A newcomer needs only `make quickstart` and `make test`. Both first set up .venv, if something changed since the last time.
#   make quickstart ARGS="seed=1 run_dir=runs/q1"     overrides for both programs
#   make test ARGS="tests/unit -k reshard"            arguments for pytest
#   make test-all                                    also the slowest tests; before a change is handed in
#   make check                                       lint, format and types
#   make matrix                                      every combination of layouts on live engines (an hour); writes docs/weights-matrix.md
#   make gpu-kit                                     in dist/gpu-kit, all that `make gpu` needs on a machine without a network (docs/gpu.md)
#   make gpu                                         checks and measures kernels, trainer and direct writes on one NVIDIA GPU
#   make rehearse                                    runs the GPU code paths on a machine without a GPU (docs/gpu.md)
#   make wheel                                       the package in dist/, which works without a checkout (docs/python.md)
#   make setup PYTHON=/path/to/python3.12             another interpreter
#   make setup-gpu                                   the environment of a machine with GPUs (docs/cluster.md)
#   make lock                                        writes requirements/gpu.txt after a change of requirements/cpu.txt or the GPU extra
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.PHONY: quickstart check test test-all matrix gpu-kit gpu rehearse libraries interpreters wheel setup setup-gpu lock clean

PYTHON ?=
PYTHONS := $(or $(PYTHON),python3.12 python3 $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/3.12.*/bin/python3.12))
ARGS ?=
STAMP := .venv/.megarl-setup
JOBS ?= $(shell nproc)
WHEELS ?= $(HOME)/.cache/megarl/wheels
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
INSTALL := .venv/bin/uv pip install --quiet --python .venv/bin/python

quickstart: setup
	@.venv/bin/megarl sft configs/quickstart.yaml $(ARGS)
	.venv/bin/megarl train configs/quickstart.yaml $(ARGS)

check: setup .venv/.megarl-check
	@echo "check: lint, format and types"
	.venv/bin/ruff check --quiet
	.venv/bin/ruff format --check --quiet
	.venv/bin/basedpyright --level error

.venv/.megarl-check: requirements/check.txt
	@$(INSTALL) --no-deps --only-binary :all: -r requirements/check.txt
	touch $@

# WORKERS processes divide the test files between them. With ARGS the tests run in one process, which prints what fails at once.
WORKERS ?= 2
test: MARKS = (not matrix or sample) and not long
test-all: MARKS = not matrix or sample
test test-all: setup libraries interpreters
	@unset PYTHONDONTWRITEBYTECODE  # otherwise hundreds of processes would each compile the same files
	.venv/bin/pytest -m "$(MARKS)" $(or $(ARGS),-n $(WORKERS) --dist loadfile --no-loadscope-reorder)

matrix: setup libraries
	@.venv/bin/pytest -m matrix --matrix-report=docs/weights-matrix.md $(ARGS)

# The kit's wheels are for Python 3.12 on x86-64 Linux, in the versions of requirements/cpu.txt. PyTorch, Triton, NumPy, Transformers and
# common packages come from the machine with the GPU. Each folder of wheels is a piece of at most 60 MiB. `engine` is SGLang with what it
# imports, without its compiled kernels.
KIT ?= dist/gpu-kit
KIT_PACKAGES := einops megatron-core msgspec omegaconf packaging pyyaml
KIT_ENGINE := sglang annotated-types apache-tvm-ffi cffi compressed-tensors dill distro fastapi gguf importlib-metadata ipython jiter jsonschema \
    jsonschema-specifications loguru openai opentelemetry-api opentelemetry-sdk opentelemetry-semantic-conventions orjson \
    partial-json-parser pybase64 pycparser pydantic pydantic-core python-multipart pyzmq referencing rpds-py setproctitle sniffio soundfile \
    starlette traitlets typing-inspection uvicorn watchfiles xgrammar
gpu-kit:
	@for python in .venv/bin/python $(PYTHONS); do
	    if "$$python" -c 'import sys, pip; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; then break; else python=; fi
	done
	if [ -z "$$python" ]; then
	    echo "gpu-kit: needs Python 3.12 with pip, found none among: .venv/bin/python $(PYTHONS)" >&2
	    exit 1
	fi
	rm -rf $(KIT) build  # leftovers of an earlier build would go into the wheel
	mkdir -p $(KIT)/wheels $(KIT)/engine
	platforms=$$(printf -- '--platform %s ' manylinux1_x86_64 manylinux2014_x86_64 manylinux_2_{17,24,26,27,28,34}_x86_64)
	get() {
	    "$$python" -m pip download --disable-pip-version-check -qq --no-deps --only-binary :all: --implementation cp \
	        --python-version 3.12 $$platforms -d "$$@"
	}
	pinned() { for package in "$$@"; do grep -ihE "^$$package==[^ ]+" -o requirements/cpu.txt requirements/gpu.txt | head -1; done; }
	get $(KIT)/wheels $$(pinned $(KIT_PACKAGES))
	get $(KIT)/engine $$(pinned $(KIT_ENGINE))
	"$$python" -m pip wheel --disable-pip-version-check -qq --no-deps -w $(KIT)/wheels .
	cp megarl/bench/gpu/kit.py $(KIT)/run.py
	{ git rev-parse --short=12 HEAD && git diff --quiet HEAD || echo "with changes"; } 2>/dev/null | paste -sd' ' >$(KIT)/commit
	echo "gpu-kit: $(KIT), $$(du -sm $(KIT)/*/ | awk '{n = split($$2, path, "/"); print path[n - 1], $$1 " MB"}' | paste -sd,)"
	echo "on the machine with the GPU: python3 $(KIT)/run.py"

# Runs the first Python whose PyTorch sees a GPU. If there is none, the first Python runs, and says what is missing.
gpu:
	@for python in .venv/bin/python $(PYTHONS); do
	    if "$$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' >/dev/null 2>&1; then break; else python=; fi
	done
	for fallback in .venv/bin/python $(PYTHONS); do
	    if [ -z "$$python" ] && "$$fallback" --version >/dev/null 2>&1; then python=$$fallback; fi
	done
	"$$python" -P megarl/bench/gpu/kit.py $(ARGS)

# System packages that some tests need: the RDMA libraries, which Mooncake's transfer engine links even for TCP; Slurm; network namespaces
# and traffic control; a browser for the report page; bubblewrap for agents. With root and apt they are installed. Otherwise those tests are
# skipped with the reason. No daemon is started: Debian asks policy-rc.d first.
libraries:
	@libraries=$$(/sbin/ldconfig -p) packages=()
	there() { grep -q "^\s*$$1 " <<<"$$libraries" || PATH="$$PATH:/usr/sbin:/sbin" command -v "$$1" >/dev/null; }
	for need in libibverbs.so.1:libibverbs1 libcurl.so.4:libcurl4 libnuma.so.1:libnuma1 slurmctld:slurm-wlm tc:iproute2 chromium:chromium bwrap:bubblewrap; do
	    there "$${need%%:*}" || packages+=("$${need##*:}")
	done
	if [ $${#packages[@]} = 0 ]; then
	    exit
	elif [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
	    echo "test: some tests are skipped; they need Debian's $${packages[*]}"
	    exit
	fi
	echo "test: installing $${packages[*]}"
	policy=/usr/sbin/policy-rc.d
	if [ ! -e $$policy ]; then
	    trap "rm -f $$policy" EXIT
	    printf '#!/bin/sh\nexit 101\n' >$$policy
	    chmod +x $$policy
	fi
	apt-get update >/dev/null 2>&1 || true
	for package in "$${packages[@]}"; do
	    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$$package" >/dev/null 2>&1 ||
	        echo "test: could not install $$package; the tests that need it are skipped"
	done

interpreters: envs/openenv/.megarl-setup envs/rehearsal/.megarl-setup
	@:

# The Python parts of Transformer Engine and flash-linear-attention (5 MB). The rehearsal needs none of their dependencies: it replaces the
# compiled part of Transformer Engine, and does not launch the kernels of flash-linear-attention.
envs/rehearsal/.megarl-setup: requirements/gpu.txt
	@versions=$$(grep -oE '^(transformer-engine|flash-linear-attention|fla-core)==[^ ]*' $<)
	echo "test:" $$versions", their Python parts, in envs/rehearsal"
	rm -rf envs/rehearsal
	$(INSTALL) --no-deps --only-binary :all: --target envs/rehearsal $$versions
	touch $@

# The GPU code paths without a GPU (docs/gpu.md): calls into Megatron-core and SGLang, kernels, the needs of libraries and engines, and for
# each config a whole step of the first and of the last rank.
REHEARSED := configs/one_gpu.yaml $(patsubst %,configs/%_aipo.yaml,8b 70b 70b_32k 405b qwen3_30b_a3b qwen3_235b_a22b gpt_oss_120b \
    qwen3_next_80b_a3b qwen3.5_397b_a17b glm_4.6 deepseek_v3 kimi_k2)
rehearse: setup envs/rehearsal/.megarl-setup
	@.venv/bin/python tests/rehearsal/calls.py
	.venv/bin/python tests/rehearsal/compile_kernels.py
	.venv/bin/python tests/rehearsal/libraries.py
	failed=0
	for gpu in H100 B200; do
	    status=0
	    .venv/bin/python -P -W ignore tests/rehearsal/engines.py $$gpu $(REHEARSED) || status=$$?
	    if [ $$status = 1 ]; then failed=1; elif [ $$status = 2 ]; then break; fi
	done
	for config in $(REHEARSED); do
	    # The first stage holds the activations of one microbatch a stage.
	    stages=$$(sed -n 's/^  pp: *\([0-9]*\).*/\1/p' $$config)
	    .venv/bin/python -W ignore tests/rehearsal/rank.py $$config --microbatches $$(($${stages:-1} + 1)) $(ARGS) || failed=1
	    if [ "$$stages" ]; then .venv/bin/python -W ignore tests/rehearsal/rank.py $$config --rank -1 $(ARGS) || failed=1; fi
	done
	for more in "trainer.optimizer.offload=true" \
	    "lora.rank=32 model.path=meta-llama/Llama-3.1-8B-Instruct model.spec=configs/models/llama-3.1-8b/config.json"; do
	    .venv/bin/python -W ignore tests/rehearsal/rank.py configs/one_gpu.yaml $$more $(ARGS) || failed=1
	done
	exit $$failed

envs/openenv/.megarl-setup: requirements/openenv.txt
	@echo "test: an interpreter with openenv in envs/openenv"
	.venv/bin/uv venv --quiet --clear --python .venv/bin/python envs/openenv
	.venv/bin/uv pip install --quiet --python envs/openenv/bin/python --no-deps --only-binary :all: -r $<
	touch $@

setup: $(STAMP)
	@:

# A virtual environment with uv. uv caches its downloads and builds, and links them into environments: a second environment takes seconds
# and hardly any disk. The stamp is written last. So an interrupted set-up begins again, and finds its packages in the cache.
define ENVIRONMENT
say() { echo "setup: $$*"; }
usable() { "$$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }
if [ ! -e $(STAMP) ] || ! usable .venv/bin/python; then
    for python in $(PYTHONS); do
        if usable "$$python"; then break; else python=; fi
    done
    if [ "$$python" ]; then
        "$$python" -m venv --clear .venv
    elif [ "$(PYTHON)" ] || ! uv venv --quiet --clear --seed --python 3.12 .venv 2>/dev/null; then
        say "needs Python 3.12 with its venv module, found none among: $(PYTHONS)." \
            "On Debian or Ubuntu: apt-get install python3.12-venv; or pip install uv, which gets it; or make setup PYTHON=/path/to/python3.12" >&2
        exit 1
    fi
    say "1/4 virtual environment in .venv, $$(.venv/bin/python --version)"
fi
rm -f $(STAMP)
endef
WITH_UV := .venv/bin/python -m pip install --disable-pip-version-check --no-compile -qq "$$(grep ^uv== requirements/cpu.txt)"

$(STAMP): pyproject.toml requirements/cpu.txt
	@$(ENVIRONMENT)
	$(WITH_UV)
	torch=$$(grep ^torch== requirements/cpu.txt)
	say "2/4 $$torch"
	if ! UV_HTTP_RETRIES=0 $(INSTALL) --no-deps --index $(TORCH_CPU_INDEX) "$$torch" 2>/dev/null; then
	    say "    $(TORCH_CPU_INDEX) does not give it. PyPI does, for CUDA: up to 2.9 GB to download, 5.2 GB on disk"
	    $(INSTALL) --constraints requirements/gpu.txt "$$torch"
	fi
	say "3/4 the $$(grep -c == requirements/cpu.txt) packages of requirements/cpu.txt"
	# This package has data for NLTK, which reads no files with hard links. So it is copied.
	$(INSTALL) --no-deps --link-mode copy "$$(grep ^llama-index-core== requirements/cpu.txt)"
	$(INSTALL) --no-deps --only-binary :all: --no-binary langdetect -r requirements/cpu.txt  # langdetect is published only as source
	say "4/4 this checkout, and bytecode of what a run imports"
	$(INSTALL) --no-deps --no-build-isolation --editable .
	# Bytecode is cached beside uv's cache. It stays valid, because linked files keep their modification times.
	kept=$$(.venv/bin/uv cache dir)/megarl-bytecode-$$(sha256sum requirements/cpu.txt | cut -c1-16).tar
	if ! tar -xf "$$kept" 2>/dev/null; then
	    imports() { env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -P -c "$$1" >/dev/null 2>&1 || true; }
	    imports "from megarl.trainer import cpu_support; cpu_support.install(); import megarl.executors.trainer, megarl.trainer.step" &
	    imports "from megarl.generator import cpu_support; cpu_support.install(); import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler" &
	    wait
	    { find .venv/lib -name '*.pyc' -print0 | tar -cf "$$kept.$$$$" --null -T - && mv "$$kept.$$$$" "$$kept"; } || rm -f "$$kept.$$$$"
	fi
	touch $@
	say "done in $$SECONDS s"

# The environment for GPUs; the installing machine needs none. Transformer Engine publishes its torch extension only as source. The headers
# and the compiler for it are wheels in this environment, so no CUDA toolkit is needed. WHEELS keeps the built wheel for other checkouts.
setup-gpu:
	@$(ENVIRONMENT)
	PYTHONPATH=. .venv/bin/python -m megarl.launch.doctor
	$(WITH_UV)
	say "2/4 the $$(grep -c == requirements/gpu.txt) packages of requirements/gpu.txt (about 6 GB to download, 11 GB on disk)"
	wheels=$$(mktemp) source=$$(mktemp) environment=$$PWD/.venv
	trap 'rm -f "$$wheels" "$$source"' EXIT
	awk -v source="$$source" -v wheels="$$wheels" '/^[^ #]/ {to = /^transformer-engine-torch==/ ? source : wheels} to {print > to}' requirements/gpu.txt
	$(INSTALL) --no-deps --link-mode copy --require-hashes --only-binary :all: -r <(awk '/^[^ ]/ {on = /^llama-index-core==/} on' "$$wheels")
	$(INSTALL) --no-deps --require-hashes --only-binary :all: --no-binary langdetect -r "$$wheels"
	version=$$(sed -n 's/^transformer-engine-torch==\([^ ]*\).*/\1/p' "$$source")
	built() { ls $(WHEELS)/transformer_engine_torch-"$$version"-cp312-*.whl 2>/dev/null || true; }
	extension=$$(built)
	if [ -z "$$extension" ]; then
	    say "3/4 the torch extension of Transformer Engine, compiled into $(WHEELS) (an hour and a half of one core)"
	    CUDA_HOME=$$(echo "$$environment"/lib/python3.12/site-packages/nvidia/cu13) PATH="$$environment/bin:$$PATH" \
	        NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_FRAMEWORK=pytorch MAX_JOBS=$(JOBS) \
	        .venv/bin/python -m pip wheel --disable-pip-version-check -qq --no-deps --no-build-isolation --require-hashes -r "$$source" -w $(WHEELS)
	    extension=$$(built)
	else
	    say "3/4 the torch extension of Transformer Engine: $$extension"
	fi
	$(INSTALL) --no-deps "$$extension"
	say "4/4 this checkout"
	$(INSTALL) --no-deps --no-build-isolation --editable .
	touch $(STAMP)
	say "done in $$SECONDS s; megarl doctor says what this machine has"

# The versions for a machine with GPUs: the CPU environment's, and the further packages that SGLang and the GPU extra need.
lock: setup
	@grep -v '^#' requirements/cpu.txt >requirements/gpu.txt
	.venv/bin/uv pip compile pyproject.toml --quiet --extra gpu --extra test --output-file requirements/gpu.txt --generate-hashes --no-annotate \
	    --python-version 3.12 --python-platform x86_64-manylinux_2_34 --custom-compile-command "make lock"

# setuptools adds to what an earlier build has left in build/, so that goes first.
wheel: setup
	@rm -rf build
	.venv/bin/uv build --quiet --wheel --no-build-isolation --python .venv/bin/python --out-dir dist .
	rm -rf build
	ls dist/megarl-*.whl

clean:
	@rm -rf .venv build dist megarl.egg-info .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	echo "clean: removed .venv, caches and build output; runs/ is left as it is"
