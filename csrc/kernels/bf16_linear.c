/* Products with bfloat16 weights: y = x W^T, summed in float32. */
#include "../bf16_tile.h"
#include "../product.h"

/* Tiles of AMX take any rows of whole groups. */
static int can_read_inputs(const struct job *job) {
#if defined(__AMX_BF16__)
    return job->bf16 && job->product->inputs % GROUP == 0;
#else
    (void)job;
    return 0;
#endif
}

/* Inputs that are bfloat16 already, where products want them so. */
static void copy_row(const struct job *job, int64_t row, struct group *groups) {
    const int64_t inputs = job->product->inputs, whole = inputs / GROUP;
    const uint16_t *x = (const uint16_t *)job->x + row * inputs;
    for (int64_t g = 0; g < whole; g++) memcpy(groups[g].values[row % PART_ROWS], x + g * GROUP, GROUP * sizeof *x);
    if (whole == job->groups) return;
    memset(groups[whole].values[row % PART_ROWS], 0, GROUP * sizeof *x);
    memcpy(groups[whole].values[row % PART_ROWS], x + whole * GROUP, (size_t)(inputs % GROUP) * sizeof *x);
}

static void prepare_row(const struct job *job, int64_t row, struct group *groups) {
    if (WORDS == 1 && job->bf16) {
        copy_row(job, row, groups);
        return;
    }
    _Alignas(64) float values[GROUP];
    for (int64_t g = 0; g < job->groups; g++) {
        read_group(job, row, g * GROUP, values);
        put_values(values, groups + g, row % PART_ROWS);
    }
}

int64_t KERNEL(shoal_bf16_product)(const struct product *product, const void *x, void *y, int64_t rows, int64_t bf16) {
    return multiply(product, x, y, rows, bf16);
}
