# Which PyTorch optimizations pay off on this machine's GPU, by how much, and at what price?
#
#   make all STEPS=150 BATCH_SIZE=256 PREFIX=./out
#
# `make help` lists everything that can be asked for.

# One technique each: the script that is run. To find the line that matters, open it.
baseline      = no_optimization.py  ## PyTorch, asked for nothing
tf32          = tensorFloat32.py    ## matrix products on tensor cores, float32 in and out
bf16          = brainFloat16.py     ## forward pass under bfloat16 autocast
torch_compile = torch_compile.py    ## kernels fused and launched by torch.compile
flash         = flash_attention.py  ## attention without the T x T matrix in memory
fused         = fused_optimizer.py  ## AdamW in a few kernels instead of many
8bit          = 8-bit_optimizer.py  ## AdamW's moments in 8 bits (bitsandbytes)
combined      = fused_optimizer.py --with brainFloat16 torch_compile flash_attention  ## BF16+TC+FA+FuOp, the headline
stack         = $(lastword $(WITH)) $(if $(word 2,$(WITH)),--with $(wordlist 2,$(words $(WITH)),last $(WITH)))  ## any of them, in the order of WITH="script script ..."

EVERY     := baseline tf32 bf16 torch_compile flash fused 8bit combined
TRAINING  := $(EVERY) stack ladder all
NEEDY     := $(TRAINING) plots init_results reset

.PHONY: $(NEEDY) help clean test peers notebook ready tests_ready
.DEFAULT_GOAL := help
.NOTPARALLEL:  # two trainings at once would time each other
.ONESHELL:
.SHELLFLAGS := -ec
MAKEFLAGS += --no-print-directory

#: STEPS=150        training steps of each technique; the first 5 are in no statistic
#: BATCH_SIZE=256   sequences in a batch
#: PREFIX=./out     where the results go: PREFIX/256B_150N_experiment/
#: MODEL=small      or gpt2 (124 M parameters, 1,024 tokens a sequence), tiny (for tests)
#: DATA=file.txt    text to train on instead of the source of Python's standard library
#: DEVICE=auto      or cuda, cpu
#: SEED=0           fixes the initial weights and the batches
#: ROUNDS=1         3 measures everything three times, in alternating order, and pools it
#: GPUS=1           4 trains on four GPUs at once, started by torchrun; BATCH_SIZE is what each of them gets
#: WITH="bf16 tf32" what `stack` stacks, in this order
#: PYTHON=          an interpreter that has what requirements.txt names, instead of one in .venv made for you
#
# A setting counts only if it stands on make's command line. Recipes find it, untouched by make, in their environment.
SETTINGS := STEPS BATCH_SIZE PREFIX MODEL DATA DEVICE SEED ROUNDS GPUS WITH PYTHON
given     = $(if $(filter command,$(firstword $(origin $1))),$(value $1))
$(foreach name,$(SETTINGS),$(eval override $(name) := $$(call given,$(name))))
$(foreach name,STEPS BATCH_SIZE MODEL DEVICE SEED ROUNDS GPUS WITH,$(eval override $(name) := $$(strip $$($(name)))))
export $(SETTINGS) RESULTS_PATH
$(foreach name,$(filter-out $(SETTINGS),$(.VARIABLES)),$(if $(call given,$(name)),\
$(error $(name) is no setting, these are: $(SETTINGS). What goes into the environment stands in front: $(name)=... make ...)))
unexport PYTHONSAFEPATH  # the scripts import Utils from the folder that they lie in

EXAMPLE  := for example: make all STEPS=150 BATCH_SIZE=256 PREFIX=./out
digitless = $(subst 1,,$(subst 2,,$(subst 3,,$(subst 4,,$(subst 5,,$(subst 6,,$(subst 7,,$(subst 8,,$(subst 9,,$1)))))))))
number    = $(if $(filter 0%,$($1))$(subst 0,,$(call digitless,$($1))),$(error $1=$($1) is not a positive whole number; $(EXAMPLE)))

ifneq ($(filter $(NEEDY),$(MAKECMDGOALS)),)
$(foreach name,STEPS BATCH_SIZE PREFIX,$(if $($(name)),,$(error $(name) is missing; $(EXAMPLE))))
$(foreach name,STEPS BATCH_SIZE ROUNDS GPUS,$(call number,$(name)))
endif

ifneq ($(filter stack,$(MAKECMDGOALS)),)
ALONE    := $(filter-out combined,$(EVERY))
SCRIPTS  := $(strip $(foreach name,$(ALONE),$($(name))))
override WITH := $(foreach name,$(WITH),$(strip $(if $(filter $(name),$(ALONE)),$($(name)),$(name:.py=).py)))
$(if $(WITH),,$(error WITH is missing; $(EXAMPLE:all=stack WITH="bf16 torch_compile")))
$(foreach name,$(WITH),$(if $(filter $(name),$(SCRIPTS)),,$(error there is no script $(name); choose from $(SCRIPTS))))
endif

BEGINNING    := $(BATCH_SIZE)B_$(STEPS)N_
KIND         := $(addsuffix gpu_,$(filter-out 1,$(GPUS)))$(addsuffix _,$(filter-out small,$(MODEL)))
RESULTS_PATH := $(PREFIX)/$(KIND)$(BEGINNING)experiment/$(BEGINNING)results.csv
ROUND_NUMBERS = $(or $(shell seq $(or $(ROUNDS),1)),$(error the program seq is missing: install coreutils))
LAUNCH        = $(if $(GPUS),-m Utils.launch --standalone --nproc-per-node="$$GPUS")
OPTIONS       = --steps "$$STEPS" --batch_size "$$BATCH_SIZE" --results_path="$$RESULTS_PATH" \
                $(if $(MODEL),--model "$$MODEL") $(if $(DATA),--data="$$DATA") $(if $(DEVICE),--device "$$DEVICE") \
                $(if $(SEED),--seed "$$SEED") $(if $(ROUNDS),--rounds "$$ROUNDS")

# Without PYTHON=..., an environment of our own: made once, and again when the versions change.
ifeq ($(PYTHON),)
override PYTHON := .venv/bin/python
ready: .venv/ready
tests_ready: .venv/tests_ready
endif
ANY_PYTHON = "$$(command -v "$$PYTHON" || echo python3)"  # for what needs no packages

.venv/ready: requirements.txt
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
	    echo "make: python3 is missing or older than 3.11; install Python 3.12, or name one with PYTHON=..." >&2
	    exit 1
	}
	python3 -m venv .venv
	.venv/bin/python -m pip install --disable-pip-version-check -r requirements.txt
	touch $@

.venv/tests_ready: .venv/ready tests/requirements.txt
	.venv/bin/python -m pip install --disable-pip-version-check -r tests/requirements.txt
	touch $@

# Whoever stops make stops the training: a shell that waits for a child hears no signal before the child has ended.
define newline


endef
define runs
@trap 'kill $$!; exit 130' INT QUIT
trap 'kill $$!; exit 143' TERM
run() {
    local status=0
    "$$PYTHON" $(LAUNCH) "$$@" $(OPTIONS) & wait $$! || status=$$?
    test $$status -ne 137 || echo "killed, as happens where memory runs out: a smaller BATCH_SIZE needs less" >&2
    return $$status
}
endef

$(EVERY) stack: ready
	$(runs)
	$(foreach round,$(ROUND_NUMBERS),run $($@) --round $(round)$(newline))

# A technique that this machine cannot run (status 77) is no failure; whatever happens to one, the others get their turn.
define tries
$(runs)
log=$$(mktemp)
missing= failed=0
trap 'rm -f "$$log"' EXIT
try() {
    name=$$1 status=0
    shift
    run "$$@" 2>"$$log" || status=$$?
    cat "$$log" >&2
    reason=$$(tail -n 1 "$$log")
    test $$status -eq 0 || missing="$$missing$$name: $${reason:-ended with status $$status}$(newline)"
    test $$status -eq 0 || test $$status -eq 77 || failed=1
}
endef
reverse = $(if $1,$(call reverse,$(wordlist 2,$(words $1),$1)) $(firstword $1))
odd     = $(filter %1 %3 %5 %7 %9,$1)

all: ready  ## the seven, combined, and the plots; with ROUNDS=3 three times, in alternating order
	$(tries)
	$(foreach round,$(ROUND_NUMBERS),$(foreach name,$(if $(call odd,$(round)),$(EVERY),$(call reverse,$(EVERY))),\
	try $(name) $($(name)) --round $(round)$(newline)))
	"$$PYTHON" plots.py --results_path="$$RESULTS_PATH" || failed=1
	test -z "$$missing" || printf '\nnot measured:\n%s' "$$missing" >&2
	exit $$failed

ladder: ready  ## BF16, then +TC, then +FA, then +FuOp or +8bOp
	$(runs)
	run brainFloat16.py
	run torch_compile.py --with brainFloat16
	run flash_attention.py --with brainFloat16 torch_compile
	run $(combined)
	run 8-bit_optimizer.py --with brainFloat16 torch_compile flash_attention

plots: ready  ## the table, summary.md and the pictures, from what has been measured
	@"$$PYTHON" plots.py --results_path="$$RESULTS_PATH"

init_results:  ## a results.csv that holds only the steps
	@$(ANY_PYTHON) -m Utils.results init --results_path="$$RESULTS_PATH" --steps "$$STEPS"

reset:  ## delete what the experiment with these settings has written
	@$(ANY_PYTHON) -m Utils.results reset --results_path="$$RESULTS_PATH"

clean:  ## delete the caches, and with PREFIX=... the files of every experiment there
	@rm -rf .cache/tokens .cache/inductor
	$(if $(PREFIX),$(ANY_PYTHON) -m Utils.results clean --prefix="$$PREFIX")

test: tests_ready  ## run the tests (those that need a GPU only where there is one)
	@"$$PYTHON" -m pytest

peers: tests_ready  ## this project's combination beside transformers' GPT-2 (GPU)
	@"$$PYTHON" -m tests.peers $(if $(MODEL),--model "$$MODEL") $(if $(BATCH_SIZE),--batch_size "$$BATCH_SIZE") \
	    $(if $(STEPS),--steps "$$STEPS")

notebook: tests_ready  ## run the walkthrough from top to bottom and keep its outputs
	@"$$PYTHON" -m nbconvert --to notebook --execute --inplace Optimizing_GPU_Utilization.ipynb

help:  ## this page
	@echo 'usage: make TARGET STEPS=150 BATCH_SIZE=256 PREFIX=./out'
	printf '\ntargets (those that run or draw something need the first three settings)\n'
	sed -n 's/^\([a-z0-9_]*\) *[:=].*## \(.*\)/    \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20
	printf '\nsettings\n'
	sed -n 's/^#: /    /p' $(firstword $(MAKEFILE_LIST))
