/* Products with weights of four bits, which become bytes in registers: the same results as with these in int8. */
#define WEIGHT_BITS 4
#include "../quantised_inputs.h"

int64_t KERNEL(shoal_int4_product)(const struct product *product, const void *x, void *y, int64_t rows, int64_t bf16) {
    return multiply(product, x, y, rows, bf16);
}
