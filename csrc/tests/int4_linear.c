/* Products with weights of four bits. */
#include "../kernels/int4_linear.c"

#define PRODUCT KERNEL(shoal_int4_product)
#include "integers.h"

int main(void) {
    check_all();
    return 0;
}
