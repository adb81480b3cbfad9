package machine

import "testing"

// News returns events with the principal of the hold: the principal of its session, or the principal for which a
// gateway has asked.
func TestNewsNameThePrincipal(t *testing.T) {
	s := newStory(t, 1000)
	s.tell("raise level=5", "open gateway principal=cert:gateway")
	s.m.Follow()
	s.tell("acquire gateway a", "acquire gateway b for=token:ci")
	news := s.m.News()
	if len(news) != 2 || news[0].Holder != "cert:gateway" || news[1].Holder != "token:ci" {
		t.Errorf("the holders: %+v", news)
	}
}
