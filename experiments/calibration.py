"""Compare methods that calibrate probabilities for unseen sites, on the runs of `experiments/new_site.py`.

    python experiments/calibration.py runs/new-site-digits runs/new-site-pacs

In every fit below these folders, each left-out site is calibrated by the other left-out sites alone. The table has the
negative log-likelihood and the expected calibration error, averaged over sites, trials and fits; then the error that
would be left if each site could have the temperature that suits it, and the range of these temperatures.

With logits z, p = softmax(z) and parameters fitted to the mean negative log-likelihood of the other sites:
    temperature, of fit         z / T, T the median over sites; 1 if it does not help at left-out sites
    temperature, median         the same without the comparison with 1
    temperature, lowest mean    z / T, T with the lowest mean negative log-likelihood
    vector                      a_c z_c + b_c (Guo et al., ICML 2017)
    beta                        a log p_c - b log(1 - p_c), a and b at least 0 (after Kull et al., AISTATS 2017)
    none, median or beta        the one of these that is best where each of the other sites is left out
    Dirichlet                   W log p + b, ODIR regularisation (Kull et al., NeurIPS 2019)
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.special import log_softmax
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from aidgn.analysis.predictions import Predictions
from aidgn.metrics import calibration_error
from aidgn.new_site.calibration import Floats, Predicted, choose_temperature, fit_temperature, log_probabilities

Site = list[Predicted]  # a trial each
Calibrate = Callable[[Floats], Floats]  # logits to logarithms of probabilities
PENALTY = 1e-2  # of differences between classes


def read_fits(folders: Sequence[Path]) -> list[dict[str, Site]]:
    """Return the predictions for left-out sites of every fit, by site."""
    fits: dict[Path, dict[str, Site]] = defaultdict(lambda: defaultdict(list))
    for folder in folders:
        for file in sorted(folder.glob("fit-*/runs/*/predictions.npz")):
            run = Predictions.load(file)
            shown = run.where(run.unseen & ~run.validation)
            if run.targets:
                fits[file.parent.parent][run.targets[0]].append((shown.logits, shown.labels))
    return list(fits.values())


def keep(sites: Sequence[Site]) -> Calibrate:
    return log_probabilities


def divide_as_fit(sites: Sequence[Site]) -> Calibrate:
    temperature = choose_temperature({str(number): site for number, site in enumerate(sites)})
    return lambda logits: log_probabilities(logits, temperature)


def divide_by_median(sites: Sequence[Site]) -> Calibrate:
    suited = [np.mean([np.log(fit_temperature(*trial)) for trial in site]) for site in sites]
    return lambda logits: log_probabilities(logits, float(np.exp(np.median(suited))))


def minimise(
    transform: Callable[[Tensor, Tensor], Tensor], start: Tensor, penalty: Callable[[Tensor], Tensor]
) -> Callable:
    """Return a method whose parameters minimise the mean negative log-likelihood over sites and a penalty."""

    def calibrate_by(sites: Sequence[Site]) -> Calibrate:
        parameters = start.clone().requires_grad_()
        optimizer = torch.optim.LBFGS([parameters], max_iter=300, line_search_fn="strong_wolfe")
        trials = [
            (torch.from_numpy(logits).double(), torch.from_numpy(labels), 1 / len(site) / len(sites))
            for site in sites
            for logits, labels in site
        ]

        def loss() -> Tensor:
            optimizer.zero_grad()
            total = penalty(parameters)
            for logits, labels, weight in trials:
                total = total + weight * cross_entropy(transform(parameters, logits), labels)
            total.backward()
            return total

        optimizer.step(loss)
        fitted = parameters.detach()
        return lambda logits: log_softmax(transform(fitted, torch.from_numpy(logits).double()).numpy(), axis=1)

    return calibrate_by


def beta(parameters: Tensor, logits: Tensor) -> Tensor:
    right = logits.log_softmax(1).clamp(min=-60)
    wrong = torch.log1p(-right.exp().clamp(max=1 - 1e-9))
    a, b = softplus(parameters)
    return a * right - b * wrong


def list_methods(classes: int) -> dict[str, Callable[[Sequence[Site]], Calibrate]]:
    identity = torch.eye(classes).double()
    others = 1 - identity
    beta_by = minimise(beta, torch.tensor([0.0, -3.0]).double(), lambda v: 0 * v.sum())
    return {
        "none": keep,
        "temperature, of fit": divide_as_fit,
        "temperature, median": divide_by_median,
        "temperature, lowest mean": minimise(
            lambda s, logits: logits * s.exp(), torch.zeros(1).double(), lambda s: 0 * s.sum()
        ),
        "vector": minimise(
            lambda v, logits: logits * v[0] + v[1],
            torch.stack([torch.ones(classes), torch.zeros(classes)]).double(),
            lambda v: PENALTY * (v[0].var() + v[1].square().mean()),
        ),
        "beta": beta_by,
        "none, median or beta, chosen": choose([keep, divide_by_median, beta_by]),
        "Dirichlet": minimise(
            lambda w, logits: logits.log_softmax(1) @ w[:-1].T + w[-1],
            torch.cat([identity, torch.zeros(1, classes).double()]),
            lambda w: PENALTY * ((w[:-1] * others).square().mean() + w[-1].square().mean()),
        ),
    }


def choose(methods: Sequence[Callable[[Sequence[Site]], Calibrate]]) -> Callable[[Sequence[Site]], Calibrate]:
    """Return the method that takes the one with the lowest negative log-likelihood where each site is left out."""

    def calibrate_by(sites: Sequence[Site]) -> Calibrate:
        losses = [np.mean([found[0] for found in cross_fit(sites, method)]) for method in methods]
        return methods[int(np.argmin(losses))](sites)

    return calibrate_by


def cross_fit(sites: Sequence[Site], method: Callable[[Sequence[Site]], Calibrate]) -> list[tuple[float, float]]:
    """Measure every trial of every site, calibrated by the other sites."""
    found = []
    for number, site in enumerate(sites):
        calibrate = method([*sites[:number], *sites[number + 1 :]])
        found += [measure(calibrate, trial) for trial in site]
    return found


def measure(calibrate: Calibrate, trial: Predicted) -> tuple[float, float]:
    """Return negative log-likelihood and calibration error."""
    logits, labels = trial
    values = calibrate(logits)
    error = calibration_error(np.exp(values.max(axis=1)), values.argmax(axis=1) == labels)
    return float(-values[np.arange(len(labels)), labels].mean()), error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="--out of experiments/new_site.py")
    fits = read_fits(parser.parse_args().folders)
    torch.set_num_threads(1)
    print("| calibration | negative log-likelihood | calibration error |\n|---|---|---|")
    for name in list_methods(2):
        found = []
        for fit in fits:
            sites = list(fit.values())
            found += cross_fit(sites, list_methods(sites[0][0][0].shape[1])[name])
        nll, error = np.mean(found, axis=0)
        print(f"| {name} | {nll:.3f} | {error:.1%} |")
    temperatures, errors = [], []
    for trial in (trial for fit in fits for site in fit.values() for trial in site):
        temperatures.append(fit_temperature(*trial))
        errors.append(measure(lambda logits: log_probabilities(logits, temperatures[-1]), trial)[1])
    low, high = np.quantile(temperatures, (0.1, 0.9))
    print(f"\nWith the temperature of each site, {np.mean(errors):.1%}; four in five are {low:.2f} to {high:.2f}.")


if __name__ == "__main__":
    main()
