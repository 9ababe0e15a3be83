/* Products with int8 weights: y = x W^T, x quantised on the fly in groups of 32. */
#define WEIGHT_BITS 8
#include "../quantised_inputs.h"

int64_t KERNEL(shoal_int8_product)(const struct product *product, const void *x, void *y, int64_t rows, int64_t bf16) {
    return multiply(product, x, y, rows, bf16);
}
