/* Rounds of FPL in C, for tables that take billions of triples: the steps and the draws of steelyard/recommend/fpl.py and
   sampling.py, triple by triple. tests/benchmarks holds it to them. Compiled by fpl_compiled.py with -DFACTORS=f. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define STRIDE (((FACTORS + 1) + 7) / 8 * 8) /* factors, bias, zeros up to whole vectors of the processor */
#define BIAS FACTORS
#define TRIES 32

typedef struct {
    int64_t users, items, triples, row_bytes;
    const int64_t *starts;        /* user u has taken[starts[u]] .. taken[starts[u + 1] - 1] */
    const int32_t *taken;
    const uint8_t *bits;          /* [users][row_bytes]: a bit per item that the user has */
    const uint64_t *triple_keys, *mask_keys;
    float *table;                 /* [items][STRIDE] */
    float *vectors;               /* [users][STRIDE], 1 in the place of the bias */
    int64_t *updates;             /* [items]: how often a change of the item was sent */
    double share;
    float rate, user_decay, positive_decay, negative_decay;
} world;

typedef struct {
    int32_t liked, other;
    int sent;
    float gradient[STRIDE];
} visit;

static uint64_t word(uint64_t key, uint64_t position) { /* randomness.words_at */
    uint64_t z = key + (position + 1) * 0x9E3779B97F4A7C15ULL;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
}

static int has(const world *w, int64_t user, int32_t item) {
    return w->bits[user * w->row_bytes + (item >> 3)] >> (item & 7) & 1;
}

static int32_t scaled(uint64_t drawn, uint64_t size) { return (int32_t)(((drawn & 0xFFFFFFFFULL) * size) >> 32); }

static int32_t draw_negative(const world *w, int64_t user, uint64_t key, uint64_t step, uint64_t drawn) {
    int32_t item = scaled(drawn, (uint64_t)w->items);
    for (uint64_t attempt = 1; attempt < TRIES && has(w, user, item); attempt++)
        item = scaled(word(key, step + (attempt << 32)), (uint64_t)w->items);
    if (!has(w, user, item)) return item;
    int64_t free_items = w->items - (w->starts[user + 1] - w->starts[user]);
    int32_t left = scaled(word(key, step + ((uint64_t)TRIES << 32)), (uint64_t)free_items);
    for (item = 0;; item++)
        if (!has(w, user, item) && left-- == 0) return item;
}

/* One user's local pass in one round: her vector moves after every triple, the items stay. */
static void local_pass(const world *w, int64_t user, uint64_t round, visit *visits) {
    uint64_t key = word(w->triple_keys[user], round), mask = word(w->mask_keys[user], round);
    uint64_t size = (uint64_t)(w->starts[user + 1] - w->starts[user]);
    float *p = w->vectors + user * STRIDE;
    const float shrinkage = 1.0f - w->rate * w->user_decay;
    for (int64_t t = 0; t < w->triples; t++) {
        visit *v = visits + t;
        uint64_t drawn = word(key, (uint64_t)t);
        v->liked = w->taken[w->starts[user] + (int64_t)(((drawn >> 32) * size) >> 32)];
        v->other = draw_negative(w, user, key, (uint64_t)t, drawn);
        v->sent = w->share >= 1 || (double)(word(mask, (uint64_t)v->liked) >> 11) * 0x1p-53 < w->share;
        __builtin_prefetch(w->table + (int64_t)v->liked * STRIDE);
        __builtin_prefetch(w->table + (int64_t)v->other * STRIDE);
    }
    for (int64_t t = 0; t < w->triples; t++) {
        visit *v = visits + t;
        const float *liked = w->table + (int64_t)v->liked * STRIDE, *other = w->table + (int64_t)v->other * STRIDE;
        float difference[STRIDE], margin = 0;
        for (int f = 0; f < STRIDE; f++) difference[f] = liked[f] - other[f];
#pragma omp simd reduction(+ : margin)
        for (int f = 0; f < STRIDE; f++) margin += p[f] * difference[f];
        float weight = 1.0f / (1.0f + expf(fminf(margin, 80.0f)));
        for (int f = 0; f < STRIDE; f++) v->gradient[f] = weight * p[f];
        float step = weight * w->rate;
        for (int f = 0; f < FACTORS; f++) p[f] = p[f] * shrinkage + step * difference[f];
    }
}

/* Write what a triple changes two rows by: s (p, 1) less the decay for the liked, its negative less its decay for the other;
   biases do not decay. */
static void changes(const world *w, const visit *v, float *up, float *down) {
    const float *liked = w->table + (int64_t)v->liked * STRIDE, *other = w->table + (int64_t)v->other * STRIDE;
    for (int f = 0; f < STRIDE; f++) {
        up[f] = v->gradient[f] - (f < FACTORS ? w->positive_decay * liked[f] : 0.0f);
        down[f] = -v->gradient[f] - (f < FACTORS ? w->negative_decay * other[f] : 0.0f);
    }
}

static void add(float *row, const float *change, float scale) {
    for (int f = 0; f < STRIDE; f++) row[f] += scale * change[f];
}

/* Rounds of one user each, one after the other; round numbers count from `first`. */
int sequential(const world *w, const int64_t *users, int64_t count, uint64_t first) {
    visit *visits = malloc((size_t)w->triples * sizeof(visit));
    float(*sums)[2][STRIDE] = malloc((size_t)w->triples * sizeof(*sums));
    if (!visits || !sums) return 1;
    for (int64_t r = 0; r < count; r++) {
        local_pass(w, users[r], first + (uint64_t)r, visits);
        /* Decays look at the rows as they were at the start of the round: all changes first, then all sums. */
        for (int64_t t = 0; t < w->triples; t++) changes(w, visits + t, sums[t][0], sums[t][1]);
        for (int64_t t = 0; t < w->triples; t++) {
            const visit *v = visits + t;
            if (v->sent) add(w->table + (int64_t)v->liked * STRIDE, sums[t][0], w->rate);
            add(w->table + (int64_t)v->other * STRIDE, sums[t][1], w->rate);
            w->updates[v->liked] += v->sent;
            w->updates[v->other] += 1;
        }
    }
    free(visits);
    free(sums);
    return 0;
}

/* Rounds of all these users at once: what they send is summed and then added. */
int parallel(const world *w, const int64_t *users, int64_t count, uint64_t first, int64_t rounds) {
    size_t bytes = (size_t)w->items * STRIDE * sizeof(float);
    visit *visits = malloc((size_t)w->triples * sizeof(visit));
    float *total = malloc(bytes), up[STRIDE], down[STRIDE];
    if (!visits || !total) return 1;
    for (int64_t r = 0; r < rounds; r++) {
        memset(total, 0, bytes);
        for (int64_t u = 0; u < count; u++) {
            local_pass(w, users[u], first + (uint64_t)r, visits);
            for (int64_t t = 0; t < w->triples; t++) {
                const visit *v = visits + t;
                changes(w, v, up, down);
                if (v->sent) add(total + (int64_t)v->liked * STRIDE, up, 1.0f);
                add(total + (int64_t)v->other * STRIDE, down, 1.0f);
                w->updates[v->liked] += v->sent;
                w->updates[v->other] += 1;
            }
        }
        for (int64_t i = 0; i < w->items; i++) add(w->table + i * STRIDE, total + i * STRIDE, w->rate);
    }
    free(visits);
    free(total);
    return 0;
}
