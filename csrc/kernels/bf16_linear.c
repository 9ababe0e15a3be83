/* Products with bfloat16 weights: y = x W^T, summed in float32. */
#include "../bf16_tile.h"
#include "../product.h"

static void prepare_row(const struct job *job, int64_t row, struct group *groups) {
    _Alignas(64) float values[GROUP];
    for (int64_t g = 0; g < job->groups; g++) {
        read_group(job, row, g * GROUP, values);
        put_values(values, groups + g, row % ROWS);
    }
}

int64_t KERNEL(shoal_bf16_product)(const struct product *product, const void *x, void *y, int64_t rows, int64_t bf16) {
    return multiply(product, x, y, rows, bf16);
}
