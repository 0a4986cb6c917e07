"""Condition types and every reason the operator writes, once. Messages say what to do; reasons are for machines."""

from __future__ import annotations

from enum import StrEnum


class ConditionType(StrEnum):
    """Order is the order of the rollup: Ready carries the first failing child's reason and message."""

    READY = "Ready"
    COMPATIBLE = "Compatible"
    FABRIC_READY = "FabricReady"
    PREFILL_READY = "PrefillReady"
    DECODE_READY = "DecodeReady"
    PEERS_WIRED = "PeersWired"
    KV_TRANSFER_VERIFIED = "KVTransferVerified"
    ROUTER_READY = "RouterReady"
    PROGRESSING = "Progressing"


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Reason(StrEnum):
    """Reasons of conditions and of events."""

    # shared
    NOT_REQUIRED = "NotRequired"
    NOT_OBSERVED_YET = "NotObservedYet"
    NOT_IMPLEMENTED_YET = "NotImplementedYet"
    ALL_READY = "AllReady"
    # Compatible
    FITS = "Fits"
    FITS_WITH_WARNINGS = "FitsWithWarnings"
    DOES_NOT_FIT = "DoesNotFit"
    WAITING_FOR_CARDS = "WaitingForCards"
    INVALID_SPEC = "InvalidSpec"
    # FabricReady
    TCP_REQUESTED = "TCPRequested"
    RESOURCE_NOT_OFFERED = "ResourceNotOffered"
    RESOURCE_EXHAUSTED = "ResourceExhausted"
    RDMA_NOT_FOUND = "RDMANotFound"
    SILENT_TCP = "SilentTCP"
    FABRIC_VERIFIED = "FabricVerified"
    # PrefillReady / DecodeReady
    PODS_READY = "PodsReady"
    LAUNCHING = "Launching"
    NOT_LAUNCHED = "NotLaunched"
    CANNOT_SCHEDULE = "CannotSchedule"
    CANNOT_PULL_IMAGE = "CannotPullImage"
    CANNOT_START = "CannotStart"
    CANNOT_MOUNT_VOLUME = "CannotMountVolume"
    LOADING = "Loading"
    CRASHING = "Crashing"
    WAITING_FOR_WIRING = "WaitingForWiring"
    WIRED_BUT_FAILING = "WiredButFailing"
    RANK_FAILED = "RankFailed"
    """A rank that lives says that it can move no KV any more: its pod is replaced."""
    RANK_LOST = "RankLost"
    """A wired engine that was not started again since no longer shows every rank. Also an event."""
    # PeersWired
    WIRED = "Wired"
    WIRING = "Wiring"
    PARTLY_WIRED = "PartlyWired"
    PEERS_REFUSED = "PeersRefused"
    PEERS_UNREACHABLE = "PeersUnreachable"
    STALE_REGISTRATION = "StaleRegistration"
    INVALID_CARD = "InvalidCard"
    WRONG_CERTIFICATE = "WrongCertificate"
    OPERATOR_CANNOT_REACH_PODS = "OperatorCannotReachPods"
    NOT_MANAGED = "NotManaged"
    # KVTransferVerified
    VERIFIED = "Verified"
    VERIFYING = "Verifying"
    VERIFICATION_FAILED = "VerificationFailed"
    BELOW_MIN_BANDWIDTH = "BelowMinBandwidth"
    # KVTransferVerified by real requests (backends NIXL and Mooncake)
    PREFILL_DOES_NOT_SEND = "PrefillDoesNotSend"
    """It fails with a decode that another prefill serves: its bootstrap thread may have ended. Restart it."""
    DECODE_DOES_NOT_RECEIVE = "DecodeDoesNotReceive"
    REQUEST_FAILED = "RequestFailed"
    """Prefill or decode, nobody else can tell which."""
    CANNOT_PROBE = "CannotProbe"
    """The engines' HTTP can not be reached, wants a key, or takes no request now."""
    # RouterReady
    ROUTER_READY = "RouterReady"
    ROUTER_STARTING = "RouterStarting"
    ROUTER_UNREACHABLE = "RouterUnreachable"
    ROUTER_HAS_NO_PAIR = "RouterHasNoPair"
    # Progressing
    STABLE = "Stable"
    ROLLING = "Rolling"
    BACKING_OFF = "BackingOff"
    BLOCKED = "Blocked"
    API_FORBIDDEN = "APIForbidden"
    API_ERROR = "APIError"
    ADMISSION_REFUSED = "AdmissionRefused"
    NAMESPACE_TERMINATING = "NamespaceTerminating"
    # events only
    REFUSED = "Refused"
    LAUNCHED = "Launched"
    PEER_REPLACED = "PeerReplaced"
    RECYCLED = "Recycled"
    DELETED = "Deleted"
