/* Products with weights of 8 bits. */
#include "../kernels/int8_linear.c"

#define PRODUCT KERNEL(shoal_int8_product)
#include "integers.h"

int main(void) {
    check_all();
    return 0;
}
