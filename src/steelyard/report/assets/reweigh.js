// Weighing a cohort again in the browser: the same arithmetic as steelyard.weighing, which a test holds it to.
// Pure functions; a cohort is {clients: [index], raw: [[value per criterion]]}.
"use strict";
const SteelyardWeigh = (() => {
  const sum = (values) => values.reduce((total, value) => total + value, 0);

  // Bring each criterion of raw[client][criterion] to [0, 1] over the cohort: share, max or rank.
  function normalise(raw, how) {
    const count = raw.length;
    const made = raw.map((row) => row.slice());
    for (let column = 0; column < (raw[0] || []).length; column++) {
      const values = raw.map((row) => row[column]);
      const total = sum(values);
      for (let row = 0; row < count; row++) {
        if (total === 0) made[row][column] = how === "share" ? 1 / count : 1;
        else if (how === "share") made[row][column] = values[row] / total;
        else if (how === "max") made[row][column] = values[row] / Math.max(...values);
        else {
          const below = values.filter((value) => value < values[row]).length;
          const upTo = values.filter((value) => value <= values[row]).length;
          made[row][column] = (below + 1 + upTo) / 2 / count;
        }
      }
    }
    return made;
  }

  const QUANTIFIERS = { all: null, most: [0.3, 0.8], "at-least-half": [0, 0.5], "as-many-as-possible": [0.5, 1] };

  function owaWeights(quantifier, count) {
    const bounds = QUANTIFIERS[quantifier];
    if (bounds === null) return Array.from({ length: count }, (_, index) => (index === count - 1 ? 1 : 0));
    const steps = Array.from({ length: count + 1 }, (_, index) =>
      Math.min(1, Math.max(0, (index / count - bounds[0]) / (bounds[1] - bounds[0]))));
    return steps.slice(1).map((step, index) => step - steps[index]);
  }

  // The score of one client; `values` stand in the order that the reader chose, most important first.
  function score(values, rule) {
    const product = values.reduce((total, value) => total * value, 1);
    switch (rule.score) {
      case "prioritized": {
        let gate = 1, total = 0;
        for (const value of values) { gate *= value; total += gate; }
        return total;
      }
      case "mean": return sum(values) / values.length;
      case "weighted-mean": {
        const all = sum(rule.weights);
        return all > 0 ? sum(values.map((value, index) => value * rule.weights[index])) / all : 0;
      }
      case "owa": {
        const share = owaWeights(rule.quantifier, values.length);
        const all = sum(share);
        const sorted = values.slice().sort((a, b) => b - a);
        return sum(sorted.map((value, index) => value * share[index] / all));
      }
      case "product": return product;
      case "power": return Math.pow(product, rule.power);
      default: throw new Error("unknown score " + rule.score);
    }
  }

  function toWeights(scores) {
    const total = sum(scores);
    return total > 0 ? scores.map((value) => value / total) : scores.map(() => 1 / scores.length);
  }

  // Weights of one cohort; rule.order holds the columns of the criteria used, most important first.
  function weigh(raw, rule) {
    const chosen = raw.map((row) => rule.order.map((column) => row[column]));
    return toWeights(normalise(chosen, rule.normalise).map((values) => score(values, rule)));
  }

  // Each client's share of all weight over the rounds, as recorded and as the rule would have given it.
  function reweigh(data, rule) {
    const recorded = new Array(data.clients.length).fill(0);
    const given = new Array(data.clients.length).fill(0);
    for (const cohort of data.rounds) {
      const weights = weigh(cohort.raw, rule);
      cohort.clients.forEach((client, index) => {
        recorded[client] += cohort.weights[index];
        given[client] += weights[index];
      });
    }
    const before = sum(recorded) || 1, after = sum(given) || 1;
    return data.clients.map((client, index) => ({
      ...client, recorded: recorded[index] / before, weight: given[index] / after,
    }));
  }

  return { normalise, owaWeights, score, toWeights, weigh, reweigh, QUANTIFIERS };
})();
