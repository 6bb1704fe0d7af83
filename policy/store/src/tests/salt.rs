//! Assignments with a salt are of a kind of their own.

use super::*;
use artifact::sign::{Envelope, Role};

#[tokio::test]
async fn a_reader_from_before_there_were_salts_refuses_a_salted_assignment() {
    let f = fixture();
    let unsalted = Assignment {
        epoch: 1,
        ..sample_assignment()
    };
    let salted = Assignment {
        epoch: 2,
        salt: "spring".into(),
        ..sample_assignment()
    };
    for assignment in [&unsalted, &salted] {
        assert!(f.store.put_assignment(assignment, &f.key).await.unwrap());
        let read = f.store.get_assignment(POLICY, assignment.epoch, &f.trusted()).await;
        assert_eq!(read.unwrap(), *assignment);
    }
    let path = |epoch: i64| f.path(&format!("policy/{POLICY}/assignment/{epoch:010}.json"));
    let verifies = |epoch, kind| {
        let envelope = Envelope::from_bytes(&std::fs::read(path(epoch)).unwrap()).unwrap();
        envelope.verify(kind, &f.trusted()).is_ok()
    };
    assert!(verifies(1, "assignment") && !verifies(1, "salted-assignment"));
    assert!(verifies(2, "salted-assignment") && !verifies(2, "assignment"));

    // Another signature does not change the kind, and neither kind is read as the other.
    let other = SigningKey::from_seed(&[9; 32]);
    let mut both = f.trusted();
    both.insert(&other, Role::Release);
    assert_eq!(f.store.resign(POLICY, &both, &other).await.unwrap(), 2);
    let read = f.store.get_assignment(POLICY, 2, &other.trusted()).await;
    assert_eq!(read.unwrap(), salted);
    let moved = Assignment {
        epoch: 2,
        ..unsalted.clone()
    };
    for (kind, assignment) in [("assignment", &salted), ("salted-assignment", &moved)] {
        let payload = serde_json::to_vec(assignment).unwrap();
        let envelope = Envelope::sign(kind, &payload, &f.key).to_bytes().unwrap();
        std::fs::write(path(2), envelope).unwrap();
        let error = f.store.get_assignment(POLICY, 2, &f.trusted()).await.unwrap_err();
        assert!(matches!(error, Error::Document { .. }), "{kind}: {error}");
    }
}
