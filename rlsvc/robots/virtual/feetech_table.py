"""The control table of the STS3215: addresses, widths, factory values.

Addresses 0 to 39 are EPROM, kept without power where `Lock` is 0; from 40 on they are RAM. Source: Feetech's memory
table of the STS3215 (magnetic encoder, 12 bit; 7.4 V version).
"""

from __future__ import annotations

from typing import NamedTuple

SIZE = 87
"""Bytes of the table."""
EPROM_END = 40
MODEL_NUMBER = 777
FIRMWARE = (3, 10)
STEPS = 4096
"""Encoder steps of a turn."""


class Register(NamedTuple):
    """One value of the table.

    Attributes:
        address: of its low byte.
        width: bytes.
        factory: value after `reset`, or after power-on for RAM.
        writable: whether a write changes it.
        sign: bit that carries the sign, None where the value has none.
    """

    address: int
    width: int
    factory: int
    writable: bool = True
    sign: int | None = None


TABLE: dict[str, Register] = {
    "Firmware_Major_Version": Register(0, 1, FIRMWARE[0], writable=False),
    "Firmware_Minor_Version": Register(1, 1, FIRMWARE[1], writable=False),
    "Model_Number": Register(3, 2, MODEL_NUMBER, writable=False),
    "ID": Register(5, 1, 1),
    "Baud_Rate": Register(6, 1, 0),
    "Return_Delay_Time": Register(7, 1, 250),  # 2 us
    "Response_Status_Level": Register(8, 1, 1),  # 0: answers to ping and reads alone
    "Min_Position_Limit": Register(9, 2, 0),  # steps
    "Max_Position_Limit": Register(11, 2, 4095),
    "Max_Temperature_Limit": Register(13, 1, 70),  # degrees Celsius
    "Max_Voltage_Limit": Register(14, 1, 80),  # 0.1 V
    "Min_Voltage_Limit": Register(15, 1, 40),
    "Max_Torque_Limit": Register(16, 2, 1000),  # 0.1 % of stall torque
    "Phase": Register(18, 1, 12),  # bit 4: positions beyond one turn
    "Unloading_Condition": Register(19, 1, 44),  # error bits after which the motor lets go
    "LED_Alarm_Condition": Register(20, 1, 47),
    "P_Coefficient": Register(21, 1, 32),
    "D_Coefficient": Register(22, 1, 32),
    "I_Coefficient": Register(23, 1, 0),
    "Minimum_Startup_Force": Register(24, 2, 16),  # 0.1 %
    "CW_Dead_Zone": Register(26, 1, 1),  # steps
    "CCW_Dead_Zone": Register(27, 1, 1),
    "Protection_Current": Register(28, 2, 500),  # 6.5 mA
    "Angular_Resolution": Register(30, 1, 1),
    "Homing_Offset": Register(31, 2, 0, sign=11),  # steps; position = encoder - offset
    "Operating_Mode": Register(33, 1, 0),
    "Protective_Torque": Register(34, 1, 20),  # %
    "Protection_Time": Register(35, 1, 200),  # 10 ms
    "Overload_Torque": Register(36, 1, 80),  # %
    "Velocity_P_Coefficient": Register(37, 1, 10),
    "Over_Current_Protection_Time": Register(38, 1, 200),  # 10 ms
    "Velocity_I_Coefficient": Register(39, 1, 10),
    "Torque_Enable": Register(40, 1, 0),
    "Acceleration": Register(41, 1, 0),  # 100 steps/s^2; 0: as fast as the motor can
    "Goal_Position": Register(42, 2, 0, sign=15),  # steps
    "Goal_Time": Register(44, 2, 0),
    "Goal_Velocity": Register(46, 2, 0, sign=15),  # steps/s; 0: as fast as the motor can
    "Torque_Limit": Register(48, 2, 1000),  # 0.1 %; Max_Torque_Limit after power-on
    "Lock": Register(55, 1, 0),
    "Present_Position": Register(56, 2, 0, writable=False, sign=15),
    "Present_Velocity": Register(58, 2, 0, writable=False, sign=15),  # steps/s
    "Present_Load": Register(60, 2, 0, writable=False, sign=10),  # 0.1 % of duty
    "Present_Voltage": Register(62, 1, 74, writable=False),  # 0.1 V
    "Present_Temperature": Register(63, 1, 30, writable=False),  # degrees Celsius
    "Status": Register(65, 1, 0, writable=False),  # error bits
    "Moving": Register(66, 1, 0, writable=False),
    "Present_Current": Register(69, 2, 0, writable=False),  # 6.5 mA
    "Moving_Velocity_Threshold": Register(80, 1, 1),  # 50 steps/s
    "DTs": Register(81, 1, 10),
    "Velocity_Unit_factor": Register(82, 1, 1),
    "Hts": Register(83, 1, 0),
    "Maximum_Velocity_Limit": Register(84, 1, 0),
    "Maximum_Acceleration": Register(85, 1, 0),
    "Acceleration_Multiplier": Register(86, 1, 1),
}

READ_ONLY = frozenset(
    address
    for register in TABLE.values()
    if not register.writable
    for address in range(register.address, register.address + register.width)
)
"""Bytes that a write leaves as they are."""
